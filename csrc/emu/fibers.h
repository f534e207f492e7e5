// The threads of an emulated block, as fibers that one CPU thread runs in turn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace cuda_on_cpu {

constexpr unsigned kWarpSize = 32;

struct Thread {
  uint3 index;
};

struct Block {
  dim3 grid, size;
  uint3 index;
};

const Thread& current_thread();
const Block& current_block();
unsigned lane();

// The block's dynamic shared memory, exactly as large as asked for and aligned to 128 bytes, every byte 0xff (a NaN)
// when a block begins.
void* dynamic_shared_memory();

// Waits for all live threads of the block. Throws through run_grid when some thread can never arrive.
void block_barrier();
// Waits for all live threads of the warp.
void warp_barrier();
// A barrier of the warp that hands over one word a lane: the words of all 32 lanes, valid until the next exchange but
// one. Throws through run_grid unless `mask` is that of a full warp whose threads all live and all come here.
const uint64_t* warp_exchange(unsigned mask, uint64_t word);

// Runs `kernel` for every thread of every block; grids of several CPU threads take turns. Throws what a thread throws,
// and std::runtime_error for a grid that a GPU would not launch, for a kernel that launches another, and when threads
// wait for each other forever. After an error the objects on the other threads' stacks are not destroyed.
void run_grid(dim3 grid, dim3 block, size_t dynamic_shared_bytes, const std::function<void()>& kernel);

// The order in which the threads of a block get their turns: 0 ascending and 1 descending, a warp going as far as it can
// before the next; above that all threads in a pseudo-random order, anew at every turn. A missing barrier shows in one
// order and hides in another.
void set_thread_order(unsigned order);

}  // namespace cuda_on_cpu
