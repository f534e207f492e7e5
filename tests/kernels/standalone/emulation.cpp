// The emulation itself: what it must refuse, and that it serves again after an error.

#include <atomic>
#include <thread>

#include "check.h"

using cuda_on_cpu::run_grid;
using standalone::expect;
using standalone::expect_error;

namespace {

// The sum of all thread numbers by shuffles, which needs everything to work.
void expect_still_works() {
  int total = 0;
  run_grid(2, 64, 0, [&] {
    int value = static_cast<int>(threadIdx.x);
    for (int offset = 16; offset > 0; offset /= 2) {
      value += __shfl_xor_sync(0xffffffffu, value, offset);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
      atomicAdd(&total, value);
    }
  });
  expect(total == 2 * 64 * 63 / 2, "a sum by shuffles is wrong");
}

}  // namespace

CHECK(emulation_refuses_a_barrier_that_not_all_reach) {
  // Thread 0 waits for its warp, whose others wait for the block.
  expect_error("deadlock", [] {
    run_grid(1, 64, 0, [] {
      if (threadIdx.x == 0) {
        __syncwarp();
      } else {
        __syncthreads();
      }
    });
  });
  expect_still_works();
}

CHECK(emulation_counts_ended_threads_as_arrived) {
  int arrived = 0;
  run_grid(1, 40, 0, [&] {
    if (threadIdx.x < 5) {
      return;
    }
    __syncthreads();
    __syncwarp();
    ++arrived;
  });
  expect(arrived == 35, "threads are missing after the barrier");
}

CHECK(emulation_refuses_a_shuffle_with_ended_threads) {
  expect_error("thread", [] {
    run_grid(1, 32, 0, [] {
      if (threadIdx.x != 7) {
        __shfl_xor_sync(0xffffffffu, 1, 1);
      }
    });
  });
  expect_error("needs every thread of the warp", [] {
    run_grid(1, 32, 0, [] {
      if (threadIdx.x == 7) {
        return;
      }
      __syncthreads();
      __ballot_sync(0xffffffffu, 1);
    });
  });
  expect_still_works();
}

CHECK(emulation_refuses_a_shuffle_that_meets_a_barrier) {
  expect_error("at __syncwarp, others in a shuffle", [] {
    run_grid(1, 32, 0, [] {
      if (threadIdx.x < 16) {
        __syncwarp();
      } else {
        __shfl_sync(0xffffffffu, 1, 20);
      }
    });
  });
  expect_still_works();
}

CHECK(emulation_refuses_parts_of_a_warp) {
  expect_error("only full warps", [] { run_grid(1, 32, 0, [] { __ballot_sync(0xffffu, 1); }); });
  expect_error("only full warps", [] { run_grid(1, 33, 0, [] { __ballot_sync(0xffffffffu, 1); }); });
}

CHECK(emulation_hands_on_a_kernels_error) {
  int num_after = 0;
  expect_error("thrown by thread", [&] {
    run_grid(3, 64, 16, [&] {
      __syncthreads();
      if (threadIdx.x == 33) {
        throw std::runtime_error("thrown by thread 33");
      }
      __syncthreads();
      ++num_after;
    });
  });
  expect(num_after == 0, "the block went on after an error");
  expect_still_works();
}

CHECK(emulation_refuses_a_kernel_that_launches_another) {
  expect_error("a kernel cannot launch another", [] { run_grid(1, 1, 0, [] { run_grid(1, 1, 0, [] {}); }); });
  expect_still_works();
}

CHECK(emulation_has_the_limits_of_a_launch) {
  const auto nothing = [] {};
  expect_error("a block of (1025, 1, 1) threads", [&] { run_grid(1, 1025, 0, nothing); });
  expect_error("a block of (0, 1, 1) threads", [&] { run_grid(1, 0, 0, nothing); });
  expect_error("a grid of (0, 1, 1) blocks", [&] { run_grid(0, 32, 0, nothing); });
  expect_error("a grid of (1, 65536, 1) blocks", [&] { run_grid(dim3(1, 65536), 32, 0, nothing); });
  expect_error("49153 bytes of dynamic shared memory", [&] { run_grid(1, 32, 49153, nothing); });
  run_grid(1, 1024, 49152, nothing);
}

CHECK(emulation_poisons_dynamic_shared_memory_for_every_block) {
  bool clean = true;
  run_grid(3, 32, 100, [&] {
    auto* bytes = static_cast<unsigned char*>(cuda_on_cpu::dynamic_shared_memory());
    for (int i = threadIdx.x; i < 100; i += 32) {
      clean = clean && bytes[i] == 0xff;
      bytes[i] = 0;
    }
  });
  expect(clean, "a block found what another left");
}

CHECK(emulation_serves_several_cpu_threads) {
  std::atomic<int> num_failed{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        try {
          expect_still_works();
        } catch (const std::exception&) {
          ++num_failed;
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  expect(num_failed == 0, "grids of several threads got into each other's way");
}

// A reader after many shuffles would always find what the other warps write after few, if all warps went at one pace.
CHECK(emulation_lets_a_warp_run_ahead) {
  for (const unsigned order : {0u, 1u}) {
    cuda_on_cpu::set_thread_order(order);
    int written = 0;
    int seen = -1;
    run_grid(1, 64, 0, [&] {
      const bool is_reader = (threadIdx.x < 32) == (order == 0);
      for (int i = 0; i < (is_reader ? 20 : 2); ++i) {
        __shfl_xor_sync(0xffffffffu, i, 1);
      }
      if (is_reader) {
        seen = seen == -1 ? written : seen;
      } else {
        written = 1;
      }
    });
    expect(seen == 0, "the first warp waited for the second without a barrier");
  }
}
