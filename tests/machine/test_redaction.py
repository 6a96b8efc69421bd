"""What may be shown, and what may be pasted: planted secrets and names, and words that only look like them."""

from __future__ import annotations

import getpass
import os
from types import SimpleNamespace

import pytest

from saturate.machine import redaction

ENVIRONMENT = {"WANDB_API_KEY": "correct-horse-battery", "DB_PASSWORD": "staple(99)!", "HOME": "/home/ann/secret-place", "MONKEY": "bananas-bananas",
               "TOKENIZERS_PARALLELISM": "parallel-parallel", "OPENAI_KEY": "short"}


@pytest.fixture
def ann(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    monkeypatch.setenv("HOME", "/data/people/ann")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="gpu7.example.org"))


def test_names_of_user_home_and_host(ann):
    text = "/data/people/ann/x /home/bob/y /scratch/ann/z ann@gpu7 gpu7.example.org annotation joann /data/people/anna gpu77"
    assert redaction.without_names(text) == "~/x /home/USER/y /scratch/USER/z USER@HOST HOST annotation joann /data/people/anna gpu77"


@pytest.mark.parametrize("text", [
    "hf_abcdefghijkl", "ghp_0123456789abcdef", "github_pat_11AA22BB33", "sk-proj-abcdefgh1234", "AKIAIOSFODNN7EXAMPLE", "xoxb-1234567890-abc",
    "eyJhbGciOiJ.eyJzdWIiOiI.c2lnbmF0dXJl", "0123456789abcdef0123456789abcdef01234567", "correct-horse-battery", "staple(99)!",
])
def test_secrets_are_hidden_wherever_they_stand(text):
    for around in ("{}", "cannot log in with {}, sorry", "'{}'", "key={}"):
        shown = redaction.without_secrets(around.format(text), ENVIRONMENT)
        assert shown == around.format("[hidden]")


@pytest.mark.parametrize(("text", "shown"), [
    ("https://ann:hunter22@host/x", "https://[hidden]@host/x"), ("password=hunter22&x=1", "password=[hidden]&x=1"),
    ("Authorization: Bearer abc.def", "Authorization: Bearer [hidden]"),
])
def test_secrets_by_their_place(text, shown):
    assert redaction.without_secrets(text, ENVIRONMENT) == shown


@pytest.mark.parametrize("text", [
    "bananas-bananas", "parallel-parallel", "/home/ann/secret-place", "a risk-free disk-space check", "short", "torch 2.13.0+cu130",
    "/usr/lib/libjemalloc.so.2", "aten::add", "tokens=512 per step",
])
def test_other_words_are_left_alone(text):
    assert redaction.without_secrets(text, ENVIRONMENT) == text


@pytest.mark.parametrize(("text", "shown"), [
    ("no route to 10.0.12.7:29500", "no route to [ip]:29500"), ("fe80::1ff:fe23:4567:890a", "[ip]"), ("2001:db8:0:0:0:0:2:1 down", "[ip] down"), ("::1", "[ip]"),
    ("GPU-0a1b2c3d-1111-2222-3333-444455556666", "[uuid]"), ("0a1b2c3d-1111-2222-3333-444455556666", "[uuid]"),
    ("Serial Number: 1320221000123", "Serial Number: [serial]"), ("eth0 aa:bb:cc:00:11:22", "eth0 [mac]"),
])
def test_addresses_and_serials(ann, text, shown):
    assert redaction.without_names(text) == shown


@pytest.mark.parametrize("text", [
    "nvidia-curand-cu12==10.3.9.90", "driver 580.126.09", "12:34:56", "0000:17:00.0", "torch::autograd", "9.20.0", "560.35.03.1", "NVLink 18 of 18",
    "std::vector", "80.0 GiB",
])
def test_versions_times_and_code_are_no_addresses(ann, text):
    assert redaction.without_names(text) == text


def test_control_characters():
    assert redaction.printable("a\x1b[31mb\nc\x00d\x9b") == "a [31mb c d "


def test_texts_in_values():
    assert redaction.each_text({"a": ["x", ("x", 1)], "b": {"c": "x"}, "d": None, "e": True}, str.upper) == \
        {"a": ["X", ["X", 1]], "b": {"c": "X"}, "d": None, "e": True}


def test_a_uid_without_an_entry(monkeypatch):
    def missing():
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(getpass, "getuser", missing)
    assert redaction.without_names("plain") == "plain"
