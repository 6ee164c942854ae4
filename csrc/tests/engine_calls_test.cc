// Engines in one process call each other: replies, nested and asynchronous calls, names, large tensors.
#include "tests/workers.h"

namespace telegrad::test {
namespace {

CASE_ON_EVERY_SCHEME(echo) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  for (const std::size_t size : {0, 1, 64, 4096, 70000, 3000000}) {
    Random random(size);
    const std::string body = random.bytes(size / 2), segment = random.bytes(size);
    const Completion o = a.call(1, {.body = body, .segments = {segment, "", segment.substr(0, size / 3)}});
    CHECK(o.status == CallStatus::kReplied);
    CHECK_EQ(o.peer, 1);
    CHECK(body_of(o) == body);
    CHECK_EQ(o.reply.segments.size(), 3u);
    CHECK(text_of(o.reply.segments[0]) == segment);
    CHECK_EQ(o.reply.segments[1]->size(), 0u);
    CHECK(text_of(o.reply.segments[2]) == segment.substr(0, size / 3));
  }
  CHECK_EQ(body_of(b.call(0, {.body = "the other way"})), "the other way");
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
}

CASE_ON_EVERY_SCHEME(calls_to_oneself) {
  Worker a(0);
  introduce({&a}, scheme);
  for (int i = 0; i < 100; ++i) CHECK_EQ(body_of(a.call(0, {.body = std::to_string(i)})), std::to_string(i));
  const std::string big(3 << 20, 'x');
  CHECK(text_of(a.call(0, {.segments = {big}}).reply.segments[0]) == big);
  CHECK_EQ(body_of(a.call(0, {.tag = kBounce, .body = "\x0c"})), std::string(1, '\0') + ".............");
}

CASE_ON_EVERY_SCHEME(calls_from_many_threads) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  std::vector<std::thread> callers;
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&, t] {
      for (int i = 0; i < times(2500); ++i) {
        const std::string body = std::to_string(t) + ":" + std::to_string(i);
        CHECK_EQ(body_of((t % 2 ? a : b).call(t % 2, {.body = body})), body);
      }
    });
  }
  for (auto& c : callers) c.join();
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
  CHECK_EQ(b.engine->stats().queued_requests, 0u);
}

CASE_ON_EVERY_SCHEME(calls_from_both_ends_without_pool_threads) {
  Worker a(0, {}, 1), b(1, {}, 1);
  introduce({&a, &b}, scheme);
  std::thread other([&] {
    for (int i = 0; i < times(2000); ++i) CHECK_EQ(body_of(b.call(0, {.body = "x"})), "x");
  });
  for (int i = 0; i < times(2000); ++i) CHECK_EQ(body_of(a.call(1, {.body = "y"})), "y");
  other.join();
}

CASE_ON_EVERY_SCHEME(the_pool_gets_deferred_completions_that_no_caller_takes) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  for (int i = 0; i < 20; ++i) a.start(1, i, {.body = std::to_string(i), .background = true});
  a.completion_count.wait_for(20);
  for (int i = 0; i < 20; ++i) CHECK_EQ(body_of(a.completions.at(i)), std::to_string(i));
  const std::uint64_t last = a.start(1, 20, {.background = true});
  Completion o;  // a waiting caller gets it, or flushes it to the pool
  if (a.engine->wait(last, kNever, {}, o) == WaitEnd::kStopped) a.completion_count.wait_for(21);
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
}

CASE_ON_EVERY_SCHEME(the_pool_gets_polled_completions_that_no_thread_waits_for) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  for (int i = 0; i < 20; ++i) {
    a.start(1, i, {.body = std::to_string(i), .polled = true});
    a.completion_count.wait_for(i + 1);
    CHECK_EQ(body_of(a.completions.at(i)), std::to_string(i));
  }
  const std::uint64_t last = a.start(1, 20, {.body = "x", .polled = true});
  Completion o;
  if (a.engine->wait(last, kNever, {}, o) == WaitEnd::kDone) CHECK_EQ(body_of(o), "x");
}

/// The pool runs a completion although a caller leads that checks for signals, and waits for another reply.
CASE_ON_EVERY_SCHEME(a_completion_does_not_wait_for_the_reply_of_a_caller_that_leads) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  std::vector<WorkItem> kept;
  Counter arrived;
  b.on_custom = [&](WorkItem& item) {
    CHECK(!b.engine->detach(item.connection, item.message.header.call_id, false));
    std::lock_guard lock(b.mutex);
    kept.push_back(std::move(item));
    arrived.add();
  };
  for (const int target : {0, 1}) a.start(1, target, {.tag = kCustom});
  arrived.wait_for(2);
  Counter checks;
  std::thread caller([&] {
    Completion completion;
    const auto interrupted = [&] {
      checks.add();
      return false;
    };
    Request held{.tag = kHold, .body = "x"};
    const std::uint64_t id = a.engine->start(1, compose(held), {});
    CHECK(a.engine->wait(id, kNever, interrupted, completion) == WaitEnd::kDone);
    CHECK_EQ(body_of(completion), "x");
  });
  checks.wait_for(1);
  b.answer(kept[0], std::string(100 << 10, 'x'));
  a.completion_count.wait_for(1);
  b.answer(kept[1], "y");
  a.completion_count.wait_for(2);
  CHECK(checks.value() < 1000);  // the caller sleeps
  b.release.set();
  caller.join();
}

CASE_ON_EVERY_SCHEME(a_completion_that_arrives_as_its_wait_is_interrupted_goes_to_the_pool) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  const std::uint64_t before = a.engine->stats().replies;
  const auto interrupted = [&] {
    b.release.set();
    while (a.engine->stats().replies == before) std::this_thread::yield();
    return true;
  };
  const std::uint64_t id = a.start(1, 7, {.tag = kHold, .body = "x"});
  Completion completion;
  CHECK(a.engine->wait(id, kNever, interrupted, completion) == WaitEnd::kInterrupted);
  a.completion_count.wait_for(1);
  CHECK_EQ(a.engine->stats().pending_calls, std::size_t{0});
}

CASE_ON_EVERY_SCHEME(callers_take_deferred_completions) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  int taken = 0;
  for (int i = 0; i < times(2000); ++i) {
    a.start(1, i, {.body = "background", .background = true});
    CHECK_EQ(body_of(a.call(1, {.body = "x"})), "x");
    WorkItem item;
    while (a.engine->take_deferred(item)) {
      CHECK_EQ(body_of(item.take_completion()), "background");
      CHECK(item.target != nullptr);
      ++taken;
    }
  }
  CHECK(taken > 0);
  a.completion_count.wait_for(times(2000) - taken);
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
}

CASE_ON_EVERY_SCHEME(background_calls_without_a_reply) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  a.call(1, {});
  a.start(1, 0, {.tag = kNoAnswer, .timeout = kMillisecond, .background = true});
  a.completion_count.wait_for(1);
  CHECK(a.completions.at(0).status == CallStatus::kTimedOut);
  a.start(1, 1, {.tag = kNoAnswer, .background = true});
  b.handled.wait_for(3);
  for (int i = 2; i < 12; ++i) a.start(1, i, {.background = true});
  a.stop();  // with and without a completion
  a.completion_count.wait_for(12);
  CHECK(a.completions.at(1).status == CallStatus::kStopped);
}

CASE_ON_EVERY_SCHEME(nested_calls_deeper_than_the_pool) {
  Settings few;
  few.handlers = 4;
  Worker a(0, few, 1), b(1, few, 1);
  introduce({&a, &b}, scheme);
  std::vector<std::thread> callers;
  for (int t = 0; t < 8; ++t) {
    callers.emplace_back([&] {
      for (int i = 0; i < 4; ++i) {
        CHECK_EQ(body_of(a.call(1, {.tag = kBounce, .body = "\x0c"})), std::string(1, '\0') + ".............");
      }
    });
  }
  for (auto& c : callers) c.join();
}

CASE(top_level_handlers_are_limited_and_nested_ones_are_not) {
  Settings few;
  few.handlers = 3;
  Worker a(0), b(1, few);
  introduce({&a, &b}, "unix");
  for (int i = 0; i < 10; ++i) a.start(1, i, {.tag = kHold});
  b.handled.wait_for(3);
  CHECK_EQ(body_of(a.call(1, {.body = "nested", .nested = true})), "nested");
  CHECK_EQ(b.handled.value(), 4);
  CHECK_EQ(b.engine->stats().queued_requests, 7u);
  b.release.set();
  a.completion_count.wait_for(10);
}

CASE_ON_EVERY_SCHEME(asynchronous_calls_complete_exactly_once) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  const int count = times(5000);
  std::vector<std::thread> callers;
  for (int t = 0; t < 2; ++t) {
    callers.emplace_back([&, t] {
      for (int i = t; i < count; i += 2) a.start(1, i, {.body = std::to_string(i), .never_wait = i % 3 == 0});
    });
  }
  for (auto& c : callers) c.join();
  a.completion_count.wait_for(count);
  std::lock_guard lock(a.mutex);
  CHECK_EQ(a.completions.size(), static_cast<std::size_t>(count));
  for (auto& [target, completion] : a.completions) CHECK_EQ(body_of(completion), std::to_string(target));
  CHECK(a.orphans.empty());
}

CASE(an_asynchronous_completion_goes_to_a_waiter_or_to_the_pool) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  const int count = times(2000);
  int waited = 0;
  for (int i = 0; i < count; ++i) {
    const std::uint64_t call = a.start(1, i, {.body = std::to_string(i)});
    Completion completion;
    const WaitEnd end = a.engine->wait(call, kNever, {}, completion);
    if (end == WaitEnd::kDone) {
      CHECK_EQ(body_of(completion), std::to_string(i));
      ++waited;
    } else {
      CHECK(end == WaitEnd::kStopped);
    }
  }
  a.completion_count.wait_for(count - waited);
  CHECK_EQ(a.engine->stats().pending_calls, 0u);
}

CASE(an_asynchronous_call_outlives_a_wait_with_a_timeout) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  const std::uint64_t call = a.start(1, 7, {.tag = kHold, .body = "later"});
  Completion completion;
  CHECK(a.engine->wait(call, now() + kMillisecond, {}, completion) == WaitEnd::kDeadline);
  b.release.set();
  a.completion_count.wait_for(1);
  CHECK_EQ(body_of(a.completions.at(7)), "later");
}

CASE_ON_EVERY_SCHEME(large_segments_both_ways_at_once) {
  Worker a(0), b(1);
  introduce({&a, &b}, scheme);
  const std::string from_a(20 << 20, 'a'), from_b(20 << 20, 'b');
  std::vector<std::thread> callers;
  for (int t = 0; t < 2; ++t) {
    callers.emplace_back([&] {
      for (int i = 0; i < 2; ++i) CHECK(text_of(a.call(1, {.segments = {from_a}}).reply.segments[0]) == from_a);
    });
    callers.emplace_back([&] {
      for (int i = 0; i < 2; ++i) CHECK(text_of(b.call(0, {.segments = {from_b}}).reply.segments[0]) == from_b);
    });
  }
  for (auto& c : callers) c.join();
}

CASE(a_name_is_defined_once_per_connection) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Name>> names;
  b.on_custom = [&](WorkItem& item) {
    std::unique_lock lock(mutex);
    CHECK_EQ(std::string(item.message.body_view()), item.name->text);
    auto [at, fresh] = names.emplace(item.name->text, item.name);
    CHECK(at->second == item.name);  // a second definition would make another object
    lock.unlock();
    b.answer(item, "");
  };
  std::vector<std::thread> callers;  // the first use of each name is a race
  for (int t = 0; t < 4; ++t) {
    callers.emplace_back([&] {
      for (std::uint32_t i = 1; i <= 100; ++i) {
        const std::string name = "module.function_" + std::to_string(i);
        const Completion o = a.call(1, {.tag = kCustom, .body = name, .name_id = i * 7, .name = name});
        CHECK(o.status == CallStatus::kReplied);
      }
    });
  }
  for (auto& c : callers) c.join();
  CHECK_EQ(names.size(), 100u);
  CHECK_EQ(body_of(a.call(1, {.body = "no name"})), "no name");
}

CASE(names_are_defined_again_on_a_new_connection) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  b.on_custom = [&](WorkItem& item) { b.answer(item, item.name->text); };
  CHECK_EQ(body_of(a.call(1, {.tag = kCustom, .name_id = 5, .name = "f"})), "f");
  a.engine->remove_peer(1, "for the test");
  a.meet(b);
  CHECK_EQ(body_of(a.call(1, {.tag = kCustom, .name_id = 5, .name = "f"})), "f");
}

CASE(one_way_messages) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  Counter got;
  b.on_custom = [&](WorkItem& item) {
    CHECK(item.kind == WorkKind::kOneway);
    CHECK_EQ(item.peer, 0);
    got.add(static_cast<int>(item.message.body_view().size()));
  };
  for (int i = 0; i < 100; ++i) {
    Request r{.tag = kCustom, .body = "x"};
    CHECK(a.engine->send(1, compose(r)));
  }
  got.wait_for(100);
  Request lost{.tag = kCustom};
  CHECK(!a.engine->send(77, compose(lost)));
}

CASE(requested_callbacks_are_merged_into_one_event) {
  Worker a(0);
  a.engine->request_callback(0);
  a.wait_for_event(EventKind::kCallback);
  const int count = 10000;
  std::thread other([&] {
    for (int i = 0; i < count; ++i) a.engine->request_callback(0);
  });
  for (int i = 0; i < count; ++i) a.engine->request_callback(0);
  other.join();
  const int seen = a.event_count.value();
  CHECK(seen >= 1);
  a.engine->request_callback(0);  // a later request is never lost
  a.event_count.wait_for(seen + 1);
}

CASE(all_owners_are_destroyed) { CHECK_EQ(Bytes::live.load(), 0); }

}  // namespace
}  // namespace telegrad::test
