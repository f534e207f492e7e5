"""The channel between processes: headers by way of the conductor, payloads straight from who made them."""

from titan_opd.channel.addresses import Address
from titan_opd.channel.conductor_port import ConductorPort, Event, Joined, Left, PortLimits, RunIdentity, Said
from titan_opd.channel.errors import ChannelError, RefusedError
from titan_opd.channel.keys import Keys, generate_keys, load_keys
from titan_opd.channel.store import PayloadFetcher, PayloadStore
from titan_opd.channel.tensors import RecordLimits, decode_record, encode_record
from titan_opd.channel.transport import InProcessTransport, Transport
from titan_opd.channel.worker_port import WorkerPort
from titan_opd.channel.zeromq import ZmqTransport

__all__ = [
    "Address",
    "ChannelError",
    "ConductorPort",
    "Event",
    "InProcessTransport",
    "Joined",
    "Keys",
    "Left",
    "PayloadFetcher",
    "PayloadStore",
    "PortLimits",
    "RecordLimits",
    "RefusedError",
    "RunIdentity",
    "Said",
    "Transport",
    "WorkerPort",
    "ZmqTransport",
    "decode_record",
    "encode_record",
    "generate_keys",
    "load_keys",
]
