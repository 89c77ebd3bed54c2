"""Multi-scale deformable attention (MSDA): one contract, several backends; and what else a layer needs fused.

The public surface is what this file exports. Importing it compiles nothing and touches no GPU.
"""

from ops.assignment import assign, assign_runs_on
from ops.msda.config import KernelConfig
from ops.msda.dispatch import BackendStatus, BackendUnavailable, backends
from ops.msda.functional import ms_deform_attn, ms_deform_attn_fused
from ops.msda.module import MSDeformAttn
from ops.relu_dropout import relu_dropout

__all__ = [
    "BackendStatus",
    "BackendUnavailable",
    "KernelConfig",
    "MSDeformAttn",
    "assign",
    "assign_runs_on",
    "backends",
    "ms_deform_attn",
    "ms_deform_attn_fused",
    "relu_dropout",
]
