"""Environment variables: what they accept, and the sentence for what they do not."""

import os
from pathlib import Path

import pytest

import cute_flash
from cute_flash.spec import settings


def test_nothing_set_means_the_defaults():
    read = settings.read({})
    assert (read.backend, read.log, read.strict, read.emulate) == (None, frozenset(), False, None)
    assert read.cache_dir == Path.home() / ".cache" / "cute_flash"


def test_every_variable_is_read():
    read = settings.read(
        {
            "CUTE_FLASH_BACKEND": "triton",
            "CUTE_FLASH_LOG": "dispatch, compile",
            "CUTE_FLASH_STRICT": "1",
            "CUTE_FLASH_CACHE_DIR": "/somewhere",
            "CUTE_FLASH_EMULATE": "sm_90a",
        }
    )
    assert read == settings.Settings("triton", frozenset({"dispatch", "compile"}), True, Path("/somewhere"), "sm_90a")


def test_the_cache_can_be_turned_off_or_follow_xdg():
    assert settings.read({"CUTE_FLASH_CACHE_DIR": "0"}).cache_dir is None
    assert settings.read({"XDG_CACHE_HOME": "/x"}).cache_dir == Path("/x/cute_flash")


def test_a_cache_folder_in_the_home_and_none_without_one(monkeypatch):
    """A variable that no shell has read may begin with ~, and some containers have a user without a home."""
    monkeypatch.setenv("HOME", "/h")
    assert settings.read({"CUTE_FLASH_CACHE_DIR": "~/x"}).cache_dir == Path("/h/x")
    assert settings.read({}).cache_dir == Path("/h/.cache/cute_flash")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is where nothing is known
    assert settings.read({}).cache_dir is None
    assert settings.read({"XDG_CACHE_HOME": "/x"}).cache_dir == Path("/x/cute_flash")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("CUTE_FLASH_BACKEND", "cuda", "sm100, sm90, triton, reference"),
        ("CUTE_FLASH_LOG", "dispatch,all", "dispatch, compile"),
        ("CUTE_FLASH_STRICT", "maybe", "0 or 1"),
        ("CUTE_FLASH_EMULATE", "sm_80", "sm_90a"),
    ],
)
def test_a_bad_value_names_the_variable_the_value_and_the_rule(name, value, rule):
    with pytest.raises(ValueError, match=name) as caught:
        settings.read({name: value})
    assert rule in str(caught.value) and repr(value.split(",")[-1]) in str(caught.value)


def test_override_is_undone_and_moves_the_generation():
    before, generation = settings.current, settings.generation
    with pytest.raises(RuntimeError), settings.override(strict=True) as inside:
        assert settings.current is inside and inside.strict
        assert settings.generation == generation + 1
        raise RuntimeError
    assert settings.current == before
    assert settings.generation == generation + 2


def test_overlapping_overrides_are_left_in_any_order():
    before = settings.current
    first, second = settings.override(emulate="sm_90a"), settings.override(emulate="sm_100a", strict=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert settings.current.emulate == "sm_100a" and settings.current.strict
    second.__exit__(None, None, None)
    assert settings.current == before


@pytest.mark.parametrize(
    ("field", "error", "words"),
    [
        (
            {"backends": "sm90"},
            TypeError,
            "backends= is not a setting: the settings are backend, log, strict, cache_dir",
        ),
        ({"backend": "sm9"}, ValueError, "backend='sm9' is not one of sm100, sm90, triton, reference"),
        ({"emulate": "sm_90"}, ValueError, "emulate='sm_90' is not one of sm_90a, sm_100a, sm_103a"),
        ({"log": frozenset({"dispach"})}, ValueError, "log='dispach' is not one of dispatch, compile"),
        ({"log": "dispatch"}, TypeError, "log='dispatch' is not a frozenset of topics: dispatch, compile"),
        ({"strict": "0"}, TypeError, "strict='0' is not True or False"),
        ({"cache_dir": "/x"}, TypeError, "cache_dir='/x' is not a pathlib.Path or None"),
    ],
    ids=str,
)
def test_override_refuses_what_is_no_setting_and_changes_nothing(field, error, words):
    before, generation = settings.current, settings.generation
    with pytest.raises(error, match=words), settings.override(strict=True), settings.override(**field):
        pass
    assert settings.current == before and settings.generation == generation + 2


def test_emulate_takes_the_architectures_that_are_known():
    with pytest.raises(ValueError, match="arch='sm_80' is not one of sm_90a"), cute_flash.emulate("sm_80"):
        pass


def test_refresh_reads_the_environment_again(monkeypatch):
    before = settings.current
    monkeypatch.setenv("CUTE_FLASH_BACKEND", "reference")
    try:
        assert settings.refresh().backend == "reference"
    finally:
        monkeypatch.undo()
        settings.refresh()
    assert settings.current == before


def test_compiler_variables_are_those_that_change_code(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", "/tmp/somewhere")
    assert "CUTE_DSL_LINEINFO=1" in settings.compiler_variables()
    assert not any("DUMP_DIR" in variable for variable in settings.compiler_variables())
