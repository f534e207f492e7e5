#include "fibers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
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
#include <sanitizer/common_interface_defs.h>
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

// What a GPU refuses to launch. Dynamic shared memory: what a kernel gets without asking for more.
constexpr unsigned kMaxBlockThreads = 1024;
constexpr unsigned kMaxGridYZ = 65535;
constexpr size_t kMaxDynamicSharedBytes = 48 << 10;

// The stack that runs next and the one that stops, for AddressSanitizer; nothing without it. A fiber that never comes
// back passes null for `keep`.
#if defined(__SANITIZE_ADDRESS__)
void announce_switch(void** keep, const void* bottom, size_t size) {
  __sanitizer_start_switch_fiber(keep, bottom, size);
}
void arrived(void* kept, const void** from_bottom, size_t* from_size) {
  __sanitizer_finish_switch_fiber(kept, from_bottom, from_size);
}
void forget_frames(const void* stack, size_t size) {
  __asan_unpoison_memory_region(stack, size);
}
#else
void announce_switch(void**, const void*, size_t) {}
void arrived(void*, const void**, size_t*) {}
void forget_frames(const void*, size_t) {}
#endif

[[noreturn]] void fail(const std::string& message) {
  throw std::runtime_error("emulated kernel: " + message);
}

enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Fiber : Thread {
  char* stack = nullptr;
  void* stack_pointer = nullptr;
  void* sanitizer_state = nullptr;
  unsigned number = 0;  // within the block
  unsigned exchanges = 0;
  State state = State::kReady;
};

struct Warp {
  unsigned num_live = 0;
  unsigned num_waiting = 0;
  bool in_exchange = false;  // what the waiting threads wait in; else a bare barrier
  uint64_t words[2][kWarpSize] = {};  // two sets, so that an exchange needs one barrier
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// One block at a time runs in the whole process: run_grid has the lock.
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
  void wait_in_warp(bool in_exchange);
  bool run_ready(const std::vector<unsigned>& turns, size_t begin, size_t end);
  void resume(Fiber& fiber);
  void yield();

  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::unique_ptr<void, Free> shared_memory_;  // exactly what was asked for, so that AddressSanitizer sees its end
  const std::function<void()>* kernel_ = nullptr;
  void* scheduler_stack_pointer_ = nullptr;
  void* scheduler_sanitizer_state_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_bytes_ = 0;
  unsigned num_live_ = 0;
  unsigned num_at_block_barrier_ = 0;
  uint32_t random_ = 1;
  std::exception_ptr error_;
};

Scheduler scheduler;
std::mutex one_grid_at_a_time;
thread_local bool inside_a_grid = false;
unsigned thread_order = 0;

// A fiber's stack above a page that nobody may touch: a stack that overflows must not run into its neighbour.
char* new_stack() {
  const size_t guard_bytes = sysconf(_SC_PAGESIZE);
  void* memory =
      mmap(nullptr, guard_bytes + kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, guard_bytes, PROT_NONE) != 0) {
    throw std::bad_alloc();
  }
  return static_cast<char*>(memory) + guard_bytes;
}

void Scheduler::prepare(const Block& new_block, size_t shared_bytes) {
  block = new_block;
  const unsigned num_threads = block.size.x * block.size.y * block.size.z;
  while (fibers_.size() < num_threads) {
    fibers_.emplace_back();
    fibers_.back().stack = new_stack();
  }
  warps_.assign((num_threads + kWarpSize - 1) / kWarpSize, Warp());
  void* shared = nullptr;
  if (posix_memalign(&shared, 128, shared_bytes) != 0) {
    throw std::bad_alloc();
  }
  shared_memory_.reset(shared);
  std::fill_n(static_cast<unsigned char*>(shared), shared_bytes, 0xff);
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
    fiber.sanitizer_state = nullptr;
    forget_frames(fiber.stack, kStackBytes);
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
    const size_t group = order > 1 ? turns.size() : kWarpSize;
    for (size_t begin = 0; begin < turns.size(); begin += group) {
      const size_t end = std::min(begin + group, turns.size());
      // A warp goes as far as it can before the next one starts; all together take one turn.
      while (run_ready(turns, begin, end)) {
        any_ran = true;
        if (order > 1) {
          break;
        }
      }
    }
    if (!any_ran) {
      fail("deadlock, a barrier that not every live thread reaches");
    }
  }
}

// Gives the threads turns[begin .. end) a turn each, those that wait for nothing; whether there were any.
bool Scheduler::run_ready(const std::vector<unsigned>& turns, size_t begin, size_t end) {
  bool any_ran = false;
  for (size_t turn = begin; turn < end; ++turn) {
    Fiber& fiber = fibers_[turns[turn]];
    if (fiber.state == State::kReady) {
      any_ran = true;
      resume(fiber);
      if (error_) {
        std::rethrow_exception(std::exchange(error_, nullptr));
      }
    }
  }
  return any_ran;
}

void Scheduler::resume(Fiber& fiber) {
  current = &fiber;
  announce_switch(&scheduler_sanitizer_state_, fiber.stack, kStackBytes);
  cuda_on_cpu_switch(&scheduler_stack_pointer_, fiber.stack_pointer);
  arrived(scheduler_sanitizer_state_, nullptr, nullptr);
}

void Scheduler::yield() {
  Fiber& fiber = *current;
  announce_switch(fiber.state == State::kDone ? nullptr : &fiber.sanitizer_state, scheduler_stack_,
                  scheduler_stack_bytes_);
  cuda_on_cpu_switch(&fiber.stack_pointer, scheduler_stack_pointer_);
  arrived(fiber.sanitizer_state, &scheduler_stack_, &scheduler_stack_bytes_);
}

void Scheduler::entry() {
  arrived(nullptr, &scheduler.scheduler_stack_, &scheduler.scheduler_stack_bytes_);
  try {
    (*scheduler.kernel_)();
    scheduler.finish_thread();
  } catch (...) {
    scheduler.error_ = std::current_exception();  // run_block throws it and leaves the block's other threads behind
    scheduler.current->state = State::kDone;
  }
  scheduler.yield();  // never comes back
}

// Threads that are done count as arrived at every later barrier, as on a GPU.
void Scheduler::finish_thread() {
  current->state = State::kDone;
  const unsigned number = current->number / kWarpSize;
  Warp& warp = warps_[number];
  --warp.num_live;
  if (warp.num_waiting > 0 && warp.in_exchange) {
    fail("a thread ends while others of its warp wait for it in a shuffle or a vote");
  }
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
  wait_in_warp(false);
}

void Scheduler::wait_in_warp(bool in_exchange) {
  const unsigned number = current->number / kWarpSize;
  Warp& warp = warps_[number];
  if (warp.num_waiting > 0 && warp.in_exchange != in_exchange) {
    fail("some threads of a warp are at __syncwarp, others in a shuffle or a vote");
  }
  current->state = State::kAtWarpBarrier;
  warp.in_exchange = in_exchange;
  if (++warp.num_waiting == warp.num_live) {
    release_warp(number);
  } else {
    yield();
  }
}

const uint64_t* Scheduler::exchange(uint64_t word) {
  Warp& warp = warps_[current->number / kWarpSize];
  if (warp.num_live < kWarpSize) {
    fail("a shuffle or a vote needs every thread of the warp, and some have ended");
  }
  uint64_t* words = warp.words[current->exchanges++ % 2];
  words[current->number % kWarpSize] = word;
  wait_in_warp(true);
  return words;
}

void* Scheduler::shared_memory() {
  return shared_memory_.get();
}

void check_launch(dim3 grid, dim3 block, size_t dynamic_shared_bytes) {
  const auto text = [](dim3 size) {
    return "(" + std::to_string(size.x) + ", " + std::to_string(size.y) + ", " + std::to_string(size.z) + ")";
  };
  const uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  if (threads == 0 || threads > kMaxBlockThreads) {
    fail("a block of " + text(block) + " threads; a GPU takes 1 to " + std::to_string(kMaxBlockThreads));
  }
  if (grid.x == 0 || grid.x > INT32_MAX || grid.y == 0 || grid.y > kMaxGridYZ || grid.z == 0 || grid.z > kMaxGridYZ) {
    fail("a grid of " + text(grid) + " blocks; a GPU takes 1 to 2147483647, 65535 and 65535");
  }
  if (dynamic_shared_bytes > kMaxDynamicSharedBytes) {
    fail(std::to_string(dynamic_shared_bytes) + " bytes of dynamic shared memory; a kernel gets 49152 without asking");
  }
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
    fail("only full warps can exchange values");
  }
  return scheduler.exchange(word);
}

void run_grid(dim3 grid, dim3 block, size_t dynamic_shared_bytes, const std::function<void()>& kernel) {
  if (inside_a_grid) {
    fail("a kernel cannot launch another");
  }
  check_launch(grid, block, dynamic_shared_bytes);
  // Operators of several threads of the process meet here; a kernel itself runs on one.
  const std::lock_guard<std::mutex> lock(one_grid_at_a_time);
  inside_a_grid = true;
  struct Leave {
    ~Leave() { inside_a_grid = false; }
  } leave;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        scheduler.run_block({grid, block, {x, y, z}}, kernel, dynamic_shared_bytes, thread_order);
      }
    }
  }
}

}  // namespace cuda_on_cpu
