"""What Triton asks of a device before it launches, and its keys beside ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget

from mamba_eagle.backend.triton.launches import Form


class NoDevice:
    """As far as Triton asks before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Keys:
    """Calls of kernels: Triton's keys by ours."""

    def __init__(self) -> None:
        self.seen: dict[object, set[object]] = {}

    @property
    def tritons_per_key(self) -> int:
        """The most; one where ours differ wherever Triton's do."""
        return max(len(each) for each in self.seen.values())

    @staticmethod
    def key(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> object:
        """Ours; None: the call is left to Triton."""
        types = [type(each) for each in (*args, *options.values())]
        form = Form(kernel, len(args), list(options), types)
        if form.bind is None:
            return None
        key, bound = form.bind(*args, **options)
        given, _, _ = kernel.device_caches[0][4](*args, **options)
        assert all(own is others for own, others in zip(bound, given.values(), strict=True))
        return id(kernel), tuple(options), tuple(types), key

    def before(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """In place of ``JITFunction.run``: sees each launch first."""

        def seen(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            self.see(kernel, args, options)
            return run(kernel, *args, grid=grid, warmup=warmup, **options)

        return seen

    def see(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        key = self.key(kernel, args, options)
        if key is not None:
            _, kinds, others = kernel.device_caches[0][4](*args, **options)
            self.seen.setdefault(key, set()).add((tuple(kinds), str(others)))
