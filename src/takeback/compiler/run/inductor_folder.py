"""Where Inductor keeps what it has made, which is pickles and native code: only in a folder that is the user's own and
that nobody else can write.

torch loads what lies there without a digest, and without asking whose it is. So the folder is looked at before anything
is compiled. One that somebody else has put in the place of the usual one is left alone, and one in takeback's cache is
used; one that the user has named is the user's to mend, and until then eager's kernels run.
"""

from __future__ import annotations

from pathlib import Path

from takeback.cache import make_private, why_not_private
from takeback.options import cache_dir, inductor_folder, set_inductor_folder_


def check_folder_() -> None:
    """Raises `PermissionError` where Inductor would load what others could have written."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # checked on 2.11 and 2.13

    asked, usual = inductor_folder(), Path(default_cache_dir()).absolute()
    folder = Path(asked).absolute() if asked is not None else usual
    fault = _fault(folder)
    if fault is not None and folder == usual:
        folder = cache_dir().absolute() / "inductor"
        fault = _fault(folder)
    if fault is not None:
        raise PermissionError(
            f"Inductor would keep and load code in {folder}: {fault}. Make it a folder that you own and only you can "
            f"write, or set TORCHINDUCTOR_CACHE_DIR to such a one"
        )
    if asked is None or Path(asked).absolute() != folder:
        set_inductor_folder_(folder)


def _fault(folder: Path) -> str | None:
    try:
        make_private(folder)
    except OSError as error:
        return str(error)
    return why_not_private(folder)
