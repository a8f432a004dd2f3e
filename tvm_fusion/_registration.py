"""What begins with `import tvm_fusion`: versions are checked, and TVM and the rooms below get to
know of this package.
"""

from . import _pins

_pins.check()

from . import transform  # noqa: E402
from .calibrate.cpu.host_profile import host_profile  # noqa: E402
from .check.index_checks import of_saved  # noqa: E402
from .config import HardwareProfile  # noqa: E402
from .config.targets import calibrate_gpu_by, calibrate_host_by  # noqa: E402
from .host.logs import configure  # noqa: E402
from .runtime.calls.compiled_module import check_indices_by  # noqa: E402
from .transform.lower.state_of_threads import hold_state_by_thread  # noqa: E402


def _gpu_profile(derived: HardwareProfile) -> HardwareProfile:
    from .calibrate.cuda.first_use import gpu_profile  # all kernels of products come with it

    return gpu_profile(derived)


def register() -> None:
    """Registers the passes with TVM and what measures this machine's CPU, and begins to log."""
    configure()
    hold_state_by_thread()
    calibrate_host_by(host_profile)
    calibrate_gpu_by(_gpu_profile)
    check_indices_by(of_saved)
    transform.register()
