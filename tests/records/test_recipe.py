"""Recipes: what is written is read back, a person's comments stay, and whatever is wrong has a name and a place."""

from __future__ import annotations

import os
import stat
import time

import msgspec
import pytest
import tomlkit
from recipe_toys import RECIPE, REGISTRY

from saturate.errors import EnvironmentProblem, RecipeError
from saturate.records import recipe as recipes
from saturate.records.recipe import Entry, MadeFor, MeasuredEvidence, Recipe

TEXT = recipes.dumps(RECIPE)


def messages(text: str) -> list[str]:
    """Everything that is wrong with a text, as `line where: message`."""
    try:
        recipes.loads(text)
    except RecipeError as error:
        return [error.message, error.evidence, error.remedy]
    return []


def test_round_trip():
    assert recipes.loads(TEXT) == RECIPE


def test_an_empty_file_is_a_recipe_that_changes_nothing():
    assert recipes.read(os.devnull) == Recipe(), "the recipe of a tune that could not begin"
    for text in ("", "\n", "# only a comment\n", "\ufeff"):
        assert recipes.loads(text) == Recipe()
    assert recipes.loads(recipes.dumps(Recipe())) == Recipe()


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert recipes.read(path) == RECIPE


def test_every_table_is_explained_to_a_newcomer():
    lines = TEXT.splitlines()
    headers = [number for number, line in enumerate(lines) if line.startswith("[")]
    assert len(headers) == 5
    assert all(lines[number - 1].startswith("# ") for number in headers)


def test_rewriting_keeps_what_a_person_wrote():
    edited = (
        TEXT.replace('device = "cpu"', 'device = "cpu"   # the box under my desk')
        .replace("[made_for]", "[made_for] # header note")
        .replace("schema = 1", "schema = 1 # do not touch")
        .replace('[[technique]]\nid = "compile"', '# ask Ann about this one\n[[technique]]\n# inside\nid = "compile" # behind')
        + "# the very end\n"
    )
    first, second, third = RECIPE.techniques
    changed = msgspec.structs.replace(
        RECIPE, made_for=MadeFor(device="cuda", cpu="Other CPU"),
        techniques=[msgspec.structs.replace(second, gain=0.3), Entry(id="new", gain=0.5), first],
    )
    text = recipes.dumps(changed, edited)
    assert recipes.loads(text) == changed
    for comment in ("# the box under my desk", "# header note", "# do not touch", "# ask Ann", "# inside", "# behind", "# the very end"):
        assert text.count(comment) == 1, comment
    assert text.index("# ask Ann") < text.index('id = "compile"') < text.index('id = "new"')
    assert "loader-workers" not in text
    assert recipes.dumps(changed, text) == text, "writing the same again changes nothing"


def test_a_persons_own_options_table_is_updated_in_place():
    previous = 'schema = 1\n[[technique]]\nid = "compile"\n[technique.options]\nmode = "default" # mine\n# also mine\nold = 1\n'
    wanted = Recipe(techniques=[Entry(id="compile", options={"mode": "reduce-overhead", "n": [1, 2]}, gain=0.1, why="w")])
    text = recipes.dumps(wanted, previous)
    assert recipes.loads(text) == wanted
    assert "# mine" in text and "# also mine" in text
    other_order = Recipe(techniques=[Entry(id="compile", options={"n": True, "mode": "reduce-overhead"})])
    again = recipes.dumps(other_order, text.replace("n = [1, 2]", "n = 1"))
    assert "n = true" in again and "# mine" in again and "# also mine" in again


@pytest.mark.parametrize("previous", [
    'made_for = {device = "x"}\n', 'made_for.device = "x"\n', 'technique = [{id = "compile"}]\n',
    '[[technique]]\nid = "compile"\n[made_for]\n[[technique]]\nid = "b"\n',
])
def test_every_way_to_write_toml_can_be_rewritten(previous):
    assert recipes.loads(recipes.dumps(RECIPE, previous)) == RECIPE


def test_what_cannot_be_read_back_is_not_written():
    for bad in (float("nan"), None, [None]):
        with pytest.raises(RecipeError):
            recipes.dumps(Recipe(techniques=[Entry(id="x", options={"a": bad})]))
    undecodable = Recipe(evidence=MeasuredEvidence(command=["python", os.fsdecode(b"\xff.py")]))
    assert recipes.loads(recipes.dumps(undecodable)).evidence.command == ["python", "?.py"]


@pytest.mark.parametrize(("text", "expected"), [
    ("x = = 1", ["recipe:1:5"]),
    ("schema = 2", ["schema 2 is not one that this saturate knows (1)", "recipe:1", "tune again"]),
    ("schema = true", ["schema True"]),
    ("schema = '1'", ["schema '1'"]),
    ("schema = 1\n\nmade_fro = 1", ["unknown key 'made_fro'", "recipe:3", "did you mean 'made_for'?"]),
    ("[[technique]]\nid = 'a'\ngian = 0.1", ["technique 1, gian", "recipe:3", "did you mean 'gain'?"]),
    ("[[technique]]\nid = 'a'\n[[technique]]\nid = 'b'\ngain = 'x'", ["technique 2, gain", "Expected `float", "recipe:5"]),
    ("[[technique]]\ngain = 0.1", ["id is missing", "recipe:1"]),
    ("[[technique]]\nid = ''", ["technique 1, id"]),
    ("[[technique]]\nid = 'a'\ngain = nan", ["finite"]),
    ("[[technique]]\nid = 'a'\noptions = {a = {b = inf}}", ["finite"]),
    ("[[technique]]\nid = 'a'\ngain_ci = [2.0, 1.0]", ["low end"]),
    ("[[technique]]\nid = 'a'\ngain_ci = [2.0]", ["length 2"]),
    ("[[technique]]\nid = 'a'\noptions = {n = 9223372036854775808}", ["64 bits"]),
    ("[[technique]]\nid = 'a'\noptions = {n = 1979-05-27}", ["dates"]),
    ("[technique]\nid = 'a'", ["array of tables", "[[technique]]"]),
    ("technique = [1]", ["must be a table"]),
    ("made_for = 1", ["must be a table"]),
    ("[evidence]\nspeedup = -1", ["> 0"]),
    ("[evidence]\nbreak_even_steps = 1.5", ["`int"]),
    ("[evidence]\ncommand = 'python'", ["`array`"]),
    ("a = " + "[" * 20_000, ["nested too deeply"]),
    ("a = " + "9" * 5_000, ["not a TOML value"]),
    ("a = 1979-99-99", ["recipe:1"]),
])
def test_each_mistake_has_a_name_a_place_and_a_remedy(text, expected):
    found = messages(text)
    assert found and all(found), found
    for part in expected:
        assert any(part in message for message in found), (part, found)


def test_no_line_is_better_than_a_wrong_one():
    assert messages('[[technique]]\nwhy = """\n[[technique]]\n"""\ngian = 1\n')[1] == "recipe"


@pytest.mark.parametrize("text", [
    ".".join("a" * 400_000) + " = 1",
    "[" + ".".join("a" * 400_000) + "]",
    'x = {y = """\n""", ' + ".".join("b" * 400_000) + " = 1}",
    '"' * 500_001, "'" * 500_001, '"\\"' * 300_000, "a" * 1_000_000, "[" * 1_000_000, "#" * 1_000_000, "\n" * 1_000_000,
    "a.b" * 300_000, "x = [" + "1," * 400_000 + "]", "\n".join(".".join("a" * 60) + f".k{i} = 1" for i in range(8_000)),
])
def test_one_mebibyte_of_anything_is_answered_soon(text):
    started = time.process_time()
    try:
        recipes.loads(text)
    except RecipeError:
        pass  # either answer is right; only the time matters here
    assert time.process_time() - started < 10


def test_dots_are_counted_in_keys_only():
    dots = "." * 90
    text = f'# {dots} "\n[[technique]]  # {dots}\nid = "gc-freeze"\nwhy = """ {dots}\n{dots} \\"\n"""\n# \'\'\' {dots}\n[evidence]\ncommand = ["{dots}", \'{dots}\']\n'
    assert recipes.loads(text).techniques[0].why.strip(" \n\\\"") == f"{dots}\n{dots}"
    for keys in (".".join("a" * 90) + ' = """\n"""', '"""\n', f'x = """\n{dots}\n"""\n{".".join("a" * 90)} = 1'):
        with pytest.raises(RecipeError):
            recipes.loads(keys)


def test_files_that_are_no_recipes(tmp_path):
    fifo, folder, huge = tmp_path / "fifo", tmp_path / "folder", tmp_path / "huge.toml"
    os.mkfifo(fifo)
    folder.mkdir()
    with open(huge, "wb") as file:
        file.truncate(1 << 30)
    binary, latin, utf16 = tmp_path / "binary", tmp_path / "latin", tmp_path / "utf16"
    binary.write_bytes(bytes(range(256)) * 10)
    latin.write_bytes("schema = 1\nwhy = 'é'".encode("latin-1"))
    utf16.write_bytes(TEXT.encode("utf-16"))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    expected = {
        fifo: "not a regular file", folder: "not a regular file", huge: "larger than 1 MiB", binary: "not UTF-8", latin: "not UTF-8",
        utf16: "UTF-16", tmp_path / "absent": "No such file", "a\0b": "null", "/dev/zero": "not a regular file",
        tmp_path / ("x" * 5000): "too long", loop: "symbolic links",
    }
    for path, message in expected.items():
        with pytest.raises(RecipeError, match=message) as caught:
            recipes.read(path)
        assert caught.value.remedy
        assert recipes.check(path, REGISTRY)[0].message == caught.value.message
    with pytest.raises(RecipeError) as caught:
        recipes.read(latin)
    assert caught.value.evidence == "line 2, byte 8 of it"


def test_validate_accepts_what_is_right():
    assert recipes.validate(RECIPE, REGISTRY) == []


@pytest.mark.parametrize(("entries", "message", "key"), [
    ([Entry(id="compil")], "unknown technique 'compil'", ("technique", 0, "id")),
    ([Entry(id="compile", options={"mod": "default"})], "mod: unknown option", ("technique", 0, "options", "mod")),
    ([Entry(id="compile", options={"mode": "fast"})], "expected one of", ("technique", 0, "options", "mode")),
    ([Entry(id="loader-workers", options={"count": True})], "a whole number", ("technique", 0, "options", "count")),
    ([Entry(id="compile"), Entry(id="compile")], "already technique 1", ("technique", 1, "id")),
    ([Entry(id="bf16-autocast"), Entry(id="fp16-autocast")], "both own 'autocast'", ("technique", 1, "id")),
    ([Entry(id="compile", numerics="exact")], "numerics class stream", ("technique", 0, "numerics")),
])
def test_validate_names_each_mistake(entries, message, key):
    problems = recipes.validate(Recipe(techniques=entries), REGISTRY)
    assert len(problems) == 1 and message in problems[0].message
    assert problems[0].key == key and problems[0].remedy


def test_a_class_that_was_stronger_once_can_be_brought_up_to_date():
    """A technique may promise less in a later version; the remedy says what to write, and that is then accepted."""
    for written, wrong in (("exact", 1), ("stream", 0)):
        problems = recipes.validate(Recipe(techniques=[Entry(id="compile", numerics=written)]), REGISTRY)
        assert len(problems) == wrong and all('write numerics = "stream" there' in problem.remedy for problem in problems)


def test_validate_suggests_the_nearest():
    assert recipes.validate(Recipe(techniques=[Entry(id="bf16_autocats")]), REGISTRY)[0].remedy == "did you mean 'bf16-autocast'?"


def test_stacked_techniques_do_not_conflict():
    assert recipes.validate(Recipe(techniques=[Entry(id="compile"), Entry(id="bf16-autocast")]), REGISTRY) == []


def test_check_lists_everything_with_lines(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("schema = 1\n[[technique]]\nid = 'compil'\ngian = 1\n[[technique]]\nid = 'compile'\n[technique.options]\nmode = 'x'\n")
    assert [(problem.line, problem.where()) for problem in recipes.check(path, REGISTRY)] == [
        (4, "technique 1, gian"), (3, "technique 1, id"), (8, "technique 2, options.mode"),
    ]


def test_diff():
    assert recipes.diff(RECIPE, RECIPE) == []
    assert recipes.diff(RECIPE, recipes.loads(TEXT)) == []
    first, second, third = RECIPE.techniques
    other = msgspec.structs.replace(
        RECIPE, made_for=msgspec.structs.replace(RECIPE.made_for, torch="2.14.0"),
        techniques=[msgspec.structs.replace(second, options={"mode": "reduce-overhead", "dynamic": False}), first, Entry(id="new")],
    )
    assert recipes.diff(RECIPE, other) == [
        "made_for.torch: 2.13.0+cpu -> 2.14.0", "- technique loader-workers", "+ technique new",
        "compile.options.mode: default -> reduce-overhead",
    ]


def test_diff_tells_true_from_one():
    a, b = (Recipe(techniques=[Entry(id="x", options={"a": value})]) for value in (True, 1))
    assert recipes.diff(a, b) == ["x.options.a: true -> 1"]


def test_write_replaces_at_once_and_keeps_comments(tmp_path):
    path = tmp_path / "deep" / "recipe.toml"
    recipes.write(path, RECIPE)
    assert recipes.read(path) == RECIPE
    path.chmod(0o640)
    path.write_text(path.read_text() + "# mine\n")
    link = tmp_path / "link.toml"
    link.symlink_to(path)
    recipes.write(link, Recipe())
    assert link.is_symlink() and recipes.read(path) == Recipe()
    assert "# mine" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [file.name for file in path.parent.iterdir()] == ["recipe.toml"], "no temporary file stays"


def test_a_new_text_is_never_readable_where_the_old_one_was_not(tmp_path, monkeypatch):
    """The temporary file gets its mode before its text, also of a text that is larger than what is written at once."""
    long = Recipe(techniques=[Entry(id="x", options={"a": "y" * 100_000})])
    recipes.write(tmp_path / "recipe.toml", long)
    (tmp_path / "recipe.toml").chmod(0o600)
    sizes, fchmod = [], os.fchmod
    monkeypatch.setattr(os, "fchmod", lambda handle, mode: (sizes.append(os.fstat(handle).st_size), fchmod(handle, mode)))
    recipes.write(tmp_path / "recipe.toml", long)
    assert sizes == [0] and stat.S_IMODE((tmp_path / "recipe.toml").stat().st_mode) == 0o600


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o002, 0o664)])
def test_the_users_umask_says_who_reads_a_new_recipe(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        recipes.write(tmp_path / "recipe.toml", RECIPE)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "recipe.toml").stat().st_mode) == mode


def test_write_keeps_a_file_that_is_not_a_recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("my thesis")
    recipes.write(path, RECIPE)
    assert recipes.read(path) == RECIPE
    path.write_text("my second thesis")
    recipes.write(path, RECIPE)
    assert (tmp_path / "recipe.toml.old").read_text() == "my thesis"
    assert (tmp_path / "recipe.toml.old1").read_text() == "my second thesis"


def test_write_does_not_replace_a_folder(tmp_path):
    (tmp_path / "recipe.toml").mkdir()
    with pytest.raises(EnvironmentProblem):
        recipes.write(tmp_path / "recipe.toml", RECIPE)
    assert os.listdir(tmp_path) == ["recipe.toml"]


def test_an_interrupted_write_leaves_the_old_recipe(tmp_path, monkeypatch):
    path = tmp_path / "recipe.toml"
    recipes.write(path, RECIPE)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        recipes.write(path, Recipe())
    assert recipes.read(path) == RECIPE
    assert os.listdir(tmp_path) == ["recipe.toml"]


def test_the_text_is_toml_for_others_too():
    assert tomlkit.parse(TEXT)["technique"][2]["options"]["count"] == 4
