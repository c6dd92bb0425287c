"""Where Inductor keeps what it has made, which is pickles and native code: only in a folder that is the user's own and
that nobody else can write.

torch loads what lies there without a digest, and without asking whose it is. So the folder is looked at before anything
is compiled or looked up. One that somebody else has put in the place of the usual one is left alone, and one in
takeback's cache is used; one that the user has named is the user's to mend, and until then eager's kernels run.
Triton's own folder, where the user has named one, is looked at likewise: Inductor's kernels for a GPU are kept there.
"""

from __future__ import annotations

from pathlib import Path

from takeback.cache import make_private, why_not_private
from takeback.options import cache_dir, inductor_folder, set_inductor_folder_, triton_folder


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
        raise _refused(folder, fault, "TORCHINDUCTOR_CACHE_DIR")
    named = triton_folder()
    if named is not None and not Path(named).absolute().is_relative_to(folder):  # Inductor names one in its own itself
        fault = _fault(Path(named).absolute())
        if fault is not None:
            raise _refused(Path(named).absolute(), fault, "TRITON_CACHE_DIR")
    if asked is None or Path(asked).absolute() != folder:
        set_inductor_folder_(folder)


def _refused(folder: Path, fault: str, variable: str) -> PermissionError:
    return PermissionError(
        f"Inductor would keep and load code in {folder}: {fault}. Make it a folder that you own and only you can "
        f"write, or set {variable} to such a one"
    )


def _fault(folder: Path) -> str | None:
    try:
        make_private(folder)
    except OSError as error:
        return str(error)
    return why_not_private(folder)
