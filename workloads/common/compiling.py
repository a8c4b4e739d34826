"""The ``compile`` block of a config: torch.compile of each block of a model, without a fallback to eager."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

_INDUCTOR = "inductor"


@dataclass(frozen=True)
class CompileSettings:
    """The keys of the block; ``None`` leaves the choice to torch."""

    enabled: bool = False
    backend: str = _INDUCTOR
    mode: str | None = None
    fullgraph: bool = True
    dynamic: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Check the rules that a schema of single keys cannot express, even if ``enabled`` is false.

        Raises:
            ValueError: The backend or an option is unknown, or two keys exclude each other.
        """
        # Listing the backends loads the compiler, which a block without any key does not need.
        if self == CompileSettings():
            return
        # By default, torch leaves out backends for debugging; an empty list keeps them.
        known = torch.compiler.list_backends(exclude_tags=[])
        if self.backend not in known:
            raise ValueError(f"compile.backend is {self.backend!r}; allowed is one of {sorted(known)}")
        if self.backend != _INDUCTOR and (self.mode or self.options):
            raise ValueError(
                f"compile.mode is {self.mode!r} and compile.options is {self.options} with compile.backend "
                f"{self.backend!r}; both are inductor's alone"
            )
        if self.mode and self.options:
            raise ValueError(f"compile.mode is {self.mode!r} and compile.options is {self.options}; give one of them")
        if self.options:
            self._check_options()

    def apply(self, modules: Iterable[nn.Module]) -> None:
        """Compile each of ``modules`` in place, which keeps parameter names; a module that does not compile raises."""
        if not self.enabled:
            return
        import torch._dynamo

        # Otherwise dynamo would run a module eagerly once it has recompiled the module too often.
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        for module in modules:
            module.compile(
                backend=self.backend,
                mode=self.mode,
                fullgraph=self.fullgraph,
                dynamic=self.dynamic,
                options=dict(self.options) or None,
            )

    def _check_options(self) -> None:
        import torch._inductor

        known = set(torch._inductor.list_options())
        if unknown := sorted(name for name in self.options if name.replace("-", "_") not in known):
            raise ValueError(f"compile.options has {unknown}; allowed is what torch._inductor.list_options() lists")
