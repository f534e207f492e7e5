#include "fibers.h"

#include <sys/mman.h>

#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if !defined(__x86_64__) || !defined(__linux__)
#error "the emulation switches stacks in x86-64 assembly, by Linux's calling convention"
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define __asan_unpoison_memory_region(address, size) (static_cast<void>(0))
#endif

// Stores the registers that a call keeps and the stack pointer of this fiber, and goes on with another's.
extern "C" void cuda_on_cpu_switch(void** save, void* load);
asm(R"(
.hidden cuda_on_cpu_switch
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch,@function
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch,.-cuda_on_cpu_switch
)");

namespace cuda_on_cpu {
namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kSavedRegisters = 6;

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Fiber : Thread {
  char* stack = nullptr;
  void* stack_pointer = nullptr;
  unsigned number = 0;  // within the block
  unsigned exchanges = 0;
  State state = State::kReady;
};

struct Warp {
  unsigned num_live = 0;
  unsigned num_waiting = 0;
  uint64_t words[2][kWarpSize] = {};  // two sets, so that an exchange needs one barrier
};

// One block at a time runs in the whole process; tests that call from several threads would have to wait anyway.
class Scheduler {
 public:
  void run_block(const Block& block, const std::function<void()>& kernel, size_t shared_bytes, unsigned order);
  void wait_for_block();
  void wait_for_warp();
  const uint64_t* exchange(uint64_t word);
  void* shared_memory();

  Block block{};
  Fiber* current = nullptr;

 private:
  static void entry();
  void prepare(const Block& block, size_t shared_bytes);
  void finish_thread();
  void release_block();
  void release_warp(unsigned warp);
  void yield() { cuda_on_cpu_switch(&current->stack_pointer, scheduler_stack_pointer_); }

  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::vector<char> shared_bytes_;
  const std::function<void()>* kernel_ = nullptr;
  void* scheduler_stack_pointer_ = nullptr;
  unsigned num_live_ = 0;
  unsigned num_at_block_barrier_ = 0;
  uint32_t random_ = 1;
  std::exception_ptr error_;
};

Scheduler scheduler;
unsigned thread_order = 0;

void Scheduler::prepare(const Block& new_block, size_t shared_bytes) {
  block = new_block;
  const unsigned num_threads = block.size.x * block.size.y * block.size.z;
  while (fibers_.size() < num_threads) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) {
      throw std::bad_alloc();
    }
    fibers_.emplace_back();
    fibers_.back().stack = static_cast<char*>(stack);
  }
  warps_.assign((num_threads + kWarpSize - 1) / kWarpSize, Warp());
  shared_bytes_.assign(shared_bytes + 128, static_cast<char>(0xff));
  num_live_ = num_threads;
  num_at_block_barrier_ = 0;
  error_ = nullptr;
  for (unsigned i = 0; i < num_threads; ++i) {
    Fiber& fiber = fibers_[i];
    fiber.number = i;
    fiber.index = {i % block.size.x, i / block.size.x % block.size.y, i / (block.size.x * block.size.y)};
    fiber.exchanges = 0;
    fiber.state = State::kReady;
    ++warps_[i / kWarpSize].num_live;
    __asan_unpoison_memory_region(fiber.stack, kStackBytes);
    // The first switch pops the registers and "returns" to entry; the null above it stands for entry's caller.
    void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(&Scheduler::entry);
    for (size_t r = 0; r < kSavedRegisters; ++r) {
      *--top = nullptr;
    }
    fiber.stack_pointer = top;
  }
}

void Scheduler::run_block(const Block& new_block, const std::function<void()>& kernel, size_t shared_bytes,
                          unsigned order) {
  prepare(new_block, shared_bytes);
  kernel_ = &kernel;
  std::vector<unsigned> turns(num_live_);
  for (unsigned i = 0; i < turns.size(); ++i) {
    turns[i] = order == 1 ? turns.size() - 1 - i : i;
  }
  random_ = order;
  while (num_live_ > 0) {
    if (order > 1) {
      for (unsigned i = turns.size() - 1; i > 0; --i) {
        random_ = random_ * 1664525u + 1013904223u;  // a linear congruential generator (Numerical Recipes)
        std::swap(turns[i], turns[(random_ >> 8) % (i + 1)]);
      }
    }
    bool any_ran = false;
    for (const unsigned i : turns) {
      if (fibers_[i].state == State::kReady) {
        any_ran = true;
        current = &fibers_[i];
        cuda_on_cpu_switch(&scheduler_stack_pointer_, current->stack_pointer);
      }
    }
    if (error_) {
      std::rethrow_exception(error_);
    }
    if (!any_ran) {
      throw std::runtime_error("emulated kernel: deadlock, a barrier that not every live thread reaches");
    }
  }
}

void Scheduler::entry() {
  try {
    (*scheduler.kernel_)();
  } catch (...) {
    scheduler.error_ = std::current_exception();
  }
  scheduler.finish_thread();
  scheduler.yield();  // never comes back
}

// Threads that are done count as arrived at every later barrier, as on a GPU.
void Scheduler::finish_thread() {
  current->state = State::kDone;
  const unsigned number = current->number / kWarpSize;
  Warp& warp = warps_[number];
  --warp.num_live;
  if (warp.num_live > 0 && warp.num_waiting == warp.num_live) {
    release_warp(number);
  }
  --num_live_;
  if (num_live_ > 0 && num_at_block_barrier_ == num_live_) {
    release_block();
  }
}

void Scheduler::release_block() {
  num_at_block_barrier_ = 0;
  for (Fiber& fiber : fibers_) {
    if (fiber.state == State::kAtBlockBarrier) {
      fiber.state = State::kReady;
    }
  }
}

void Scheduler::release_warp(unsigned warp) {
  warps_[warp].num_waiting = 0;
  const size_t end = std::min<size_t>(fibers_.size(), (warp + 1) * kWarpSize);
  for (size_t i = warp * kWarpSize; i < end; ++i) {
    if (fibers_[i].state == State::kAtWarpBarrier) {
      fibers_[i].state = State::kReady;
    }
  }
}

void Scheduler::wait_for_block() {
  current->state = State::kAtBlockBarrier;
  if (++num_at_block_barrier_ == num_live_) {
    release_block();
  } else {
    yield();
  }
}

void Scheduler::wait_for_warp() {
  const unsigned number = current->number / kWarpSize;
  current->state = State::kAtWarpBarrier;
  if (++warps_[number].num_waiting == warps_[number].num_live) {
    release_warp(number);
  } else {
    yield();
  }
}

const uint64_t* Scheduler::exchange(uint64_t word) {
  uint64_t* words = warps_[current->number / kWarpSize].words[current->exchanges++ % 2];
  words[current->number % kWarpSize] = word;
  wait_for_warp();
  return words;
}

void* Scheduler::shared_memory() {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(shared_bytes_.data());
  return reinterpret_cast<void*>((begin + 127) & ~uintptr_t{127});
}

}  // namespace

const Thread& current_thread() { return *scheduler.current; }
const Block& current_block() { return scheduler.block; }
unsigned lane() { return scheduler.current->number % kWarpSize; }
void* dynamic_shared_memory() { return scheduler.shared_memory(); }
void block_barrier() { scheduler.wait_for_block(); }
void warp_barrier() { scheduler.wait_for_warp(); }
void set_thread_order(unsigned order) { thread_order = order; }

const uint64_t* warp_exchange(unsigned mask, uint64_t word) {
  const unsigned block_threads = scheduler.block.size.x * scheduler.block.size.y * scheduler.block.size.z;
  if (mask != 0xffffffffu || block_threads % kWarpSize != 0) {
    throw std::runtime_error("emulated kernel: only full warps can exchange values");
  }
  return scheduler.exchange(word);
}

void run_grid(dim3 grid, dim3 block, size_t dynamic_shared_bytes, const std::function<void()>& kernel) {
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        scheduler.run_block({grid, block, {x, y, z}}, kernel, dynamic_shared_bytes, thread_order);
      }
    }
  }
}

}  // namespace cuda_on_cpu
