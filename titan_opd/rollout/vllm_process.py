"""`VllmProcess`: vLLM's scheduler and workers in processes of their own, steered from an event loop in a thread here.

What is called here waits until it is done; vLLM writes on meanwhile, unless it is paused.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from torch import Tensor

from titan_opd.rollout.vllm_requests import Requests
from titan_opd.rollout.vllm_setup import log_quantized
from titan_opd.rollout.vllm_weights import Bucket
from titan_opd.weights.errors import VerificationError
from titan_opd.weights.pieces import Piece, WeightSpec

_SETTLE_SECONDS = 0.01
_HEALTH_SECONDS = 1.0  # between two looks at vLLM's processes while one of them is waited for


class VllmProcess:
    """A running `AsyncLLM`, and the shared memory through which it gets weights.

    Args:
        arguments: of `AsyncEngineArgs`.
        specs: what a complete update of its weights consists of.
        clear_cache: whether a pause makes vLLM forget keys and values, to be computed anew.

    Attributes:
        llm: to be used in coroutines of `run` only.
        bucket: the shared memory.

    Raises:
        RuntimeError: vLLM does not start.
    """

    def __init__(self, arguments: dict[str, Any], specs: Mapping[str, WeightSpec], *, clear_cache: bool) -> None:
        self.llm: Any = None
        self._clear_cache = clear_cache
        self._keys = itertools.count()
        self._is_paused = False
        self._is_updating = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        try:
            self.llm = self.run(_open(arguments))
            quantized = self.run(self.llm.collective_rpc("quantized_layers"))[0]
            log_quantized(quantized, arguments.get("quantization", "none"))
            self.bucket = Bucket(specs)
            try:
                self.run(self._share())
            finally:
                self.bucket.unlink()
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What `work` returns in the event loop.

        Raises:
            RuntimeError: vLLM's processes have died.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                done, _ = concurrent.futures.wait([future], timeout=_HEALTH_SECONDS)
                if done:
                    return future.result()
                if self.llm is not None and self.llm.errored:  # what it was asked when it died nobody answers
                    future.cancel()
                    raise EngineDeadError
        except EngineDeadError as error:
            raise RuntimeError("vLLM's processes have died; what they said before is in the output above") from error

    def close(self) -> None:
        """End vLLM's processes; nothing may be under way."""
        if self.llm is not None:
            self.run(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _shut_down(self) -> None:
        self.llm.shutdown()

    def numbers_written(self) -> dict[str, int]:
        """How many tokens of each request have come, by the request's key."""
        states = self.llm.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}

    def logprobs(self, token_ids: list[int]) -> Tensor:
        """[T - 1] float32, of each token but the first, given those before it."""
        return self.run(self._read(token_ids))

    async def _read(self, token_ids: list[int]) -> Tensor:
        params = Requests.prompt_parameters(0)
        async for output in self.llm.generate({"prompt_token_ids": token_ids}, params, f"text-{next(self._keys)}"):
            final = output
        return Requests.prompt_logprobs(final)[1][:, 0]

    # ---- Weights -----------------------------------------------------------------------------------------------------

    async def _share(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        place = {"path": self.bucket.path, "num_bytes": self.bucket.num_bytes}
        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=place))

    def begin_update(self) -> None:
        """Pause between two steps, and open an update."""
        self.run(self._pause())
        if self._is_updating:  # one that broke off: vLLM wants it ended, with whatever has come
            self.run(self.llm.finish_weight_update())
        self._is_updating = True
        self.run(self.llm.start_weight_update())

    async def _pause(self) -> None:
        if self._is_paused:  # after an update that broke off
            return
        self._is_paused = True
        await self.llm.pause_generation(mode="keep", clear_cache=self._clear_cache)
        # The outputs of the last step are on their way through the loop: the numbers of tokens have to settle.
        before = None
        while before != (before := self.numbers_written()):
            await asyncio.sleep(_SETTLE_SECONDS)

    def send(self, pieces: Sequence[Piece]) -> None:
        """Bring whole tensors to the workers."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        for layout in self.bucket.fill(pieces):
            self.run(self.llm.update_weights(WeightTransferUpdateRequest(update_info={"layout": layout})))

    def finish_update(self, version: int) -> None:
        """Close the update."""
        self.run(self.llm.finish_weight_update(str(version)))
        self._is_updating = False

    def resume(self) -> None:
        """Write on; nothing when it is not paused."""
        if self._is_paused:
            self.run(self.llm.resume_generation())
            self._is_paused = False

    def digests(self) -> Mapping[str, int]:
        """Of the tensors as the workers got them.

        Raises:
            VerificationError: the workers got different ones.
        """
        first, *others = self.run(self.llm.collective_rpc("weight_digests"))
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise VerificationError(f"vLLM's worker {rank} received other bytes than worker 0")
        return first


async def _open(arguments: dict[str, Any]) -> Any:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from titan_opd.rollout.vllm_receiver import BACKEND

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            enable_log_requests=False,
            **arguments,
        )
    )
    await llm.collective_rpc("end_with_parent")
    return llm
