"""Where an error came from."""

from harness import REPO

from spreeze import errors
from spreeze.errors import SpreezeError, error_place


def test_an_error_of_this_package_has_no_place_in_user_code_wherever_the_package_is_installed(monkeypatch):
    monkeypatch.setattr(errors, "_PACKAGES", (f"{REPO}/",))
    scope = {"caught": [], "SpreezeError": SpreezeError}
    # Code without a file: all frames are this package's own.
    exec(
        "from spreeze.config.profiles import read_profile\n"
        "try:\n    read_profile('no such profile', None)\nexcept SpreezeError as error:\n    caught.append(error)",
        scope,
    )
    assert error_place(scope["caught"][0]) is None
