"""A file that others may read is replaced in one step."""

import stat

import pytest

from tvm_fusion.calibrate import command
from tvm_fusion.cost.learned import refit, samples
from tvm_fusion.errors import InputError
from tvm_fusion.host.atomic_files import replace_file


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_the_new_text_takes_the_place_of_the_old_one_with_its_permissions(tmp_path):
    file = tmp_path / "profile.toml"
    file.write_text("old")
    file.chmod(0o600)
    replace_file(file, "new é")
    assert file.read_text(encoding="utf-8") == "new é"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert names(tmp_path) == ["profile.toml"]


def test_a_check_sees_the_new_text_and_may_keep_the_old_one(tmp_path):
    file = tmp_path / "profile.toml"
    file.write_text("old")
    seen = []

    def check(new):
        seen.append(new.read_text())
        raise ValueError("no profile")

    with pytest.raises(ValueError, match="no profile"):
        replace_file(file, "new", check)
    assert (seen, file.read_text(), names(tmp_path)) == (["new"], "old", ["profile.toml"])


def test_a_folder_that_is_not_there_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(InputError, match=r"cannot write .*missing/x\.json"):
        replace_file(tmp_path / "missing" / "x.json", "text")


def test_samples_residuals_and_profiles_are_written_by_one_helper():
    assert samples.replace_file is refit.replace_file is command.replace_file is replace_file
