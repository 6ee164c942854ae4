// The slab of pending calls: ids, generations and deadlines, compared with a simple model.
#include "core/call_slab.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tests/check.h"

namespace telegrad::test {
namespace {

CASE(an_id_is_never_used_again) {
  CallSlab table;
  std::set<std::uint64_t> seen;
  std::uint64_t last = 0;
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t id = table.open(3);
    CHECK(id != 0);
    CHECK(seen.insert(id).second);
    CHECK(table.find(last) == nullptr);
    CHECK_EQ(table.find(id)->peer, 3);
    CHECK(table.find(id)->status == CallStatus::kPending);
    table.close(id);
    CHECK(table.find(id) == nullptr);
    last = id;
  }
  CHECK_EQ(table.size(), 0u);
}

CASE(unknown_ids_find_no_call) {
  CallSlab table;
  const std::uint64_t id = table.open(1);
  for (const std::uint64_t wrong : {std::uint64_t{0}, std::uint64_t{1}, id + 1, id + (std::uint64_t{1} << 32), ~id,
                                    std::uint64_t{0xffffffff}, UINT64_MAX, id & 0xffffffff00000000}) {
    CHECK(table.find(wrong) == nullptr);
  }
  CHECK(table.find(id) != nullptr);
}

CASE(the_address_of_a_call_is_stable) {
  CallSlab table;
  const std::uint64_t first = table.open(1);
  Call* const call = table.find(first);
  for (int i = 0; i < 10000; ++i) table.open(2);
  CHECK_EQ(table.find(first), call);
}

CASE(a_closed_call_leaves_no_state) {
  CallSlab table;
  struct CountsRelease final : KeepAlive {
    explicit CountsRelease(int* count) : count(count) {}
    ~CountsRelease() override { ++*count; }
    int* count;
  };
  int gone = 0;
  const std::uint64_t id = table.open(1);
  Call& call = *table.find(id);
  call.is_async = true;
  table.count_async(call);
  call.keep_alive = std::make_unique<CountsRelease>(&gone);
  call.completion.why = "x";
  call.connection = 5;
  table.set_deadline(id, 100);
  table.close(id);
  CHECK_EQ(gone, 1);
  CHECK_EQ(table.waiting_async(), 0u);
  CHECK_EQ(table.next_deadline(), kNever);
  CHECK_EQ(table.pop_expired(kNever), 0u);
  const Call& next = *table.find(table.open(2));
  CHECK(!next.is_async && !next.keep_alive && !next.waiter && next.connection == 0 && next.completion.why.empty());
}

CASE(deadlines_against_a_model) {
  CallSlab table;
  Random random(1);
  std::map<std::uint64_t, Nanos> model;  // open calls and their deadlines
  Nanos at = 0;
  for (int i = 0; i < 20000; ++i) {
    switch (random.below(4)) {
      case 0:
      case 1: {
        const std::uint64_t id = table.open(1);
        const Nanos deadline = random.below(5) ? at + static_cast<Nanos>(random.below(1000)) : kNever;
        table.set_deadline(id, deadline);
        model[id] = deadline;
        break;
      }
      case 2:
        if (!model.empty()) {
          auto it = model.lower_bound(random.next());
          if (it == model.end()) it = model.begin();
          if (random.below(2)) {
            table.close(it->first);
            model.erase(it);
          } else {
            table.clear_deadline(*table.find(it->first));
            it->second = kNever;
          }
        }
        break;
      default:
        at += static_cast<Nanos>(random.below(100));
        while (const std::uint64_t id = table.pop_expired(at)) {
          CHECK(model.at(id) <= at);
          model[id] = kNever;
        }
    }
    Nanos next = kNever;
    for (auto& [id, deadline] : model) next = std::min(next, deadline);
    CHECK_EQ(table.next_deadline(), next);
    CHECK_EQ(table.size(), model.size());
  }
  std::set<std::uint64_t> listed;
  table.for_each([&](std::uint64_t id, Call&) { listed.insert(id); });
  CHECK_EQ(listed.size(), model.size());
  for (auto& [id, deadline] : model) CHECK(listed.contains(id));
}

CASE(calls_may_be_closed_while_they_are_listed) {
  CallSlab table;
  for (int i = 0; i < 100; ++i) table.open(i % 3);
  table.for_each([&](std::uint64_t id, Call& call) {
    if (call.peer == 1) table.close(id);
  });
  CHECK_EQ(table.size(), 67u);
}

}  // namespace
}  // namespace telegrad::test
