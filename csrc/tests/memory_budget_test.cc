// One budget for the arenas and the cache of a worker.
#include "memory/memory_budget.h"

#include "memory/buffer_pool.h"
#include "memory/multicast_arena.h"
#include "tests/shm_pair.h"

namespace telegrad::test {
namespace {

using Budget = std::shared_ptr<MemoryBudget>;

/// Returns a budget that shares nothing with others.
Budget budget_of(std::uint64_t bytes) {
  struct Alone {
    explicit Alone(std::uint64_t bytes) : budget(bytes, use) {}
    MemoryUse use;
    MemoryBudget budget;
  };
  const auto alone = std::make_shared<Alone>(bytes);
  return {alone, &alone->budget};
}

CASE(a_budget_is_not_exceeded) {
  MemoryUse use;
  MemoryBudget budget(100, use);
  CHECK(budget.reserve(60));
  CHECK(!budget.reserve(41));
  CHECK(!budget.reserve(UINT64_MAX));
  CHECK(budget.reserve(40));
  CHECK_EQ(budget.used(), 100u);
  CHECK_EQ(budget.refused(), 2u);
  CHECK(budget.take_short());
  CHECK(!budget.take_short());
  budget.release(60);
  CHECK(budget.reserve(60));
}

/// Each worker of a process has its limit of what all of them use.
CASE(budgets_of_one_process_count_together) {
  MemoryUse process;
  MemoryBudget large(100, process), small(50, process);
  CHECK(large.reserve(40));
  CHECK(!small.reserve(11));
  CHECK(small.reserve(10));
  CHECK(!small.reserve(1));
  CHECK(large.reserve(50));
  CHECK(!large.reserve(1));
  CHECK_EQ(large.used(), 100u);
  CHECK_EQ(small.used(), 100u);
  CHECK_EQ(large.refused(), 1u);
  CHECK_EQ(small.refused(), 2u);
  CHECK(large.take_short() && small.take_short());  // either may have unused memory
  CHECK(!large.take_short() && !small.take_short());
  large.release(90);
  CHECK(small.reserve(40));
}

CASE(workers_of_a_process_share_one_count_and_a_child_begins_again) {
  MemoryBudget first(100), second(100);
  const std::uint64_t before = first.used();
  CHECK(before == 0 && first.reserve(60));
  CHECK(!second.reserve(41));
  MemoryUse::after_fork();
  MemoryBudget third(100);
  CHECK_EQ(third.used(), 0u);
  first.release(60);
  CHECK_EQ(first.used(), 0u);
  CHECK_EQ(third.used(), 0u);
}

CASE(a_share_is_given_back_once) {
  const Budget budget = budget_of(100);
  {
    auto share = BudgetShare::take(budget, 60);
    CHECK(share && !BudgetShare::take(budget, 41));
    const BudgetShare moved = std::move(*share);
    CHECK_EQ(moved.size(), 60u);
    CHECK_EQ(budget->used(), 60u);
  }
  CHECK_EQ(budget->used(), 0u);
}

CASE(cached_memory_counts_and_is_freed_without_room) {
  const Budget budget = budget_of(3 * kMiB);
  const auto pool = BufferPool::make(64 * kMiB, budget);
  auto first = pool->allocate(2 * kMiB), second = pool->allocate(2 * kMiB);
  CHECK_EQ(budget->used(), 0u);  // the program has it
  first.reset();
  second.reset();
  CHECK_EQ(pool->stats().cached_bytes, 2 * kMiB);
  CHECK_EQ(budget->used(), 2 * kMiB);
  first = pool->allocate(2 * kMiB);
  CHECK_EQ(budget->used(), 0u);
  first.reset();
  pool->trim(kNever);
  CHECK_EQ(budget->used(), 0u);
}

CASE(multicast_memory_counts) {
  const Budget budget = budget_of(9 * kMiB);
  const auto arena = std::make_shared<MulticastArena>(64 * kMiB, budget);
  auto first = arena->allocate(kMiB);
  CHECK_EQ(budget->used(), 8 * kMiB);
  CHECK(!arena->allocate(8 * kMiB));
  first.reset();
  arena->trim(kNever);
  CHECK_EQ(budget->used(), 0u);
}

/// A link of a worker with this budget.
struct BudgetPair : Pair {
  explicit BudgetPair(const Budget& budget) { ends.a->set_budget(budget); }
};

CASE(a_small_tensor_takes_a_small_part) {
  const Budget budget = budget_of(64 * kMiB);
  BudgetPair p(budget);
  p.warm_up(16 << 10);
  CHECK(p.ends.a->lease_capacity() <= (256 << 10));
  CHECK_EQ(budget->used(), p.ends.a->lease_capacity());
}

CASE(an_arena_grows_in_steps) {
  const Budget budget = budget_of(1 << 30);
  BudgetPair p(budget);
  std::size_t before = 0;
  int steps = 0;
  for (int i = 0; i < 2000; ++i) {  // all are kept
    p.pass(std::string(16 << 10, 'x'));
    const std::size_t now = p.ends.a->lease_capacity();
    CHECK(now <= std::max<std::size_t>(2 * before, 256 << 10));
    steps += now > before;
    before = now;
  }
  CHECK(steps >= 5);
  CHECK_EQ(budget->used(), before);
}

CASE(arenas_share_the_budget_and_bytes_are_sent_without_it) {
  const Budget budget = budget_of(12 * kMiB);
  BudgetPair p(budget), q(budget);
  p.warm_up(kMiB);
  CHECK_EQ(budget->used(), 8 * kMiB);
  q.warm_up(kMiB);  // not room for eight, but for some
  CHECK(budget->used() <= 12 * kMiB);
  for (int i = 0; i < 20; ++i) {
    p.pass(std::string(kMiB, 'p'));
    q.pass(std::string(kMiB, 'q'));
    CHECK(budget->used() <= 12 * kMiB);
  }
  CHECK(budget->refused() > 0);
  CHECK(p.text(19) == std::string(kMiB, 'p') && q.text(19) == std::string(kMiB, 'q'));
}

CASE(unused_memory_is_given_back) {
  const Budget budget = budget_of(8 * kMiB);
  BudgetPair p(budget), q(budget);
  p.warm_up(kMiB);
  for (int i = 0; i < 3; ++i) CHECK(!q.pass(std::string(kMiB, 'a')));
  p.ends.a->trim(kNever);
  CHECK_EQ(budget->used(), 0u);
  BudgetPair r(budget);
  r.warm_up(kMiB);
  CHECK_EQ(budget->used(), 8 * kMiB);
}

/// A tensor that fits needs no other memory: unused chunks of the same arena make room.
CASE(unused_chunks_make_room_for_a_larger_tensor) {
  const Budget budget = budget_of(8 * kMiB);
  BudgetPair p(budget);
  p.warm_up(32 << 10);
  p.warm_up(8 * kMiB);
  CHECK_EQ(budget->used(), 8 * kMiB);
}

CASE(the_end_of_a_link_gives_back_its_memory) {
  const Budget budget = budget_of(64 * kMiB);
  {
    BudgetPair p(budget);
    p.warm_up(kMiB);
    CHECK(budget->used() > 0);
  }
  CHECK_EQ(budget->used(), 0u);
}

}  // namespace
}  // namespace telegrad::test
