"""How a published version gets to an engine."""

from titan_opd.weights.transports.base import Deadline, Inlet, Outlet
from titan_opd.weights.transports.channel import WEIGHT_LIMITS, ChannelInlet, ChannelOutlet
from titan_opd.weights.transports.cuda_ipc import CudaIpcInlet, CudaIpcOutlet
from titan_opd.weights.transports.in_process import InProcess
from titan_opd.weights.transports.process_group import ProcessGroupInlet, ProcessGroupOutlet
from titan_opd.weights.transports.shared_memory import SharedMemoryInlet, SharedMemoryOutlet, machine_id

__all__ = [
    "WEIGHT_LIMITS",
    "ChannelInlet",
    "ChannelOutlet",
    "CudaIpcInlet",
    "CudaIpcOutlet",
    "Deadline",
    "InProcess",
    "Inlet",
    "Outlet",
    "ProcessGroupInlet",
    "ProcessGroupOutlet",
    "SharedMemoryInlet",
    "SharedMemoryOutlet",
    "machine_id",
]
