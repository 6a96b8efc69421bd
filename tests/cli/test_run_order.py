"""A recipe lists techniques as its writer likes; they are applied in the order that they declare."""

from __future__ import annotations

from saturate.cli import run
from saturate.records import recipe as recipes


def test_techniques_are_applied_in_their_own_order(tmp_path):
    written = ["fp16-autocast", "dynamic-batch", "global-batch", "loader-workers"]
    path = tmp_path / "recipe.toml"
    path.write_text("schema = 1\n" + "".join(f'[[technique]]\nid = "{name}"\n' for name in written))
    assert [chosen.id for chosen in run._chosen(recipes.read(path))] == ["loader-workers", "global-batch", "dynamic-batch", "fp16-autocast"]
