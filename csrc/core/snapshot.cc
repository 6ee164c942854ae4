#include "core/snapshot.h"

#include <algorithm>

#include "core/engine.h"

namespace telegrad {

Snapshot Engine::snapshot(const std::function<void(std::uint64_t, const KeepAlive&)>& on_target) {
  Snapshot out;
  Lock lock(parts_.mutex);
  out.at = now();
  parts_.calls.describe(out, on_target);
  parts_.queue.describe(out);
  parts_.canceler.describe(out);
  parts_.peers.describe(out);
  parts_.overload.describe(out);
  return out;
}

void CallTable::describe(Snapshot& out, const std::function<void(std::uint64_t, const KeepAlive&)>& on_target) {
  slab_.for_each([&](std::uint64_t id, const Call& call) {
    if (call.status != CallStatus::kPending) return;
    if (call.target) on_target(id, *call.target);
    out.calls.push_back(
        {.id = id, .peer = call.peer, .name_id = call.name_id, .connection = call.connection, .since = call.since});
  });
}

namespace {

RequestSnapshot describe(const RunningRequest& r) {
  return {.connection = r.connection,
          .call = r.call,
          .peer = r.peer,
          .state = RequestSnapshot::State::kRunning,
          .since = r.since};
}

}  // namespace

std::optional<RequestSnapshot> Engine::find_request(std::uint64_t connection, std::uint64_t call) {
  Lock lock(parts_.mutex);
  if (const RunningRequest* running = parts_.queue.find_running(connection, call)) return describe(*running);
  return parts_.canceler.find(connection, call);
}

void WorkQueue::describe(Snapshot& out) const {
  std::vector<const std::deque<WorkItem>*> queues{&nested_, &top_};
  for (const auto& [connection, held] : held_) queues.push_back(&held);
  for (const auto* queue : queues) {
    for (const WorkItem& item : *queue) {
      out.requests.push_back({.connection = item.connection,
                              .call = item.message.header.call_id,
                              .peer = item.peer,
                              .state = RequestSnapshot::State::kQueued,
                              .since = item.since,
                              .deadline = item.deadline,
                              .name = item.name ? item.name->text : ""});
    }
  }
  for (const RunningRequest& r : requests_of_threads_) {
    if (r.call != 0) out.requests.push_back(telegrad::describe(r));
  }
}

RequestSnapshot Canceler::describe(const Key& key, const Detached& request) {
  using State = RequestSnapshot::State;
  return {.connection = key.first,
          .call = key.second,
          .peer = request.peer,
          .state = request.deferred ? State::kDeferred : State::kParked,
          .since = request.since,
          .name = request.name ? request.name->text : ""};
}

std::optional<RequestSnapshot> Canceler::find(std::uint64_t connection, std::uint64_t call) const {
  const auto found = detached_.find({connection, call});
  if (found == detached_.end()) return std::nullopt;
  return describe(found->first, found->second);
}

void Canceler::describe(Snapshot& out) const {
  for (const auto& [key, request] : detached_) out.requests.push_back(describe(key, request));
}

std::uint32_t WorkQueue::deepest() const {
  std::uint32_t most = 0;
  for (const RunningRequest& r : requests_of_threads_) {
    if (r.call != 0) most = std::max(most, r.depth);
  }
  return most;
}

void Overload::describe(Snapshot& out) {
  std::int64_t in_flight = 0, in_flight_bytes = 0, kept = 0, outstanding = 0;
  std::size_t leased = 0, unauthenticated = 0, copied = 0;
  std::uint32_t names = 0;
  for (const auto& [id, c] : parts_.peers.connections()) {
    unauthenticated += !c->initiator && c->state == Connection::State::kHandshaking;
    names = std::max({names, c->names_of_peer.load(), c->names_defined.load()});
    if (c->resumes) copied = std::max(copied, c->link->resumable()->waiting().bytes);
    in_flight = std::max<std::int64_t>(in_flight, c->in_flight);
    in_flight_bytes = std::max(in_flight_bytes, c->in_flight_bytes.total());
    kept = std::max<std::int64_t>(kept, c->kept_bytes);
    outstanding = std::max<std::int64_t>(outstanding, c->outstanding);
    leased = std::max(leased, c->link->lease_capacity());
  }
  const std::int64_t pending = parts_.peers.most_pending_bytes();
  const auto add = [&](const char* option, Limit limit, auto used, std::uint64_t most, std::uint64_t refused = 0) {
    refused += refused_[static_cast<std::size_t>(limit)];
    out.limits.push_back(
        {.option = option, .used = static_cast<std::uint64_t>(used), .limit = most, .refused = refused});
  };
  const std::size_t waiting = std::max(parts_.peers.most_pending(), parts_.canceler.parked());
  add("max_call_depth", Limit::kCallDepth, parts_.queue.deepest(), limits_.call_depth);
  add("max_in_flight", Limit::kInFlight, in_flight, parts_.settings.handshake.limits.requests);
  add("max_in_flight_bytes", Limit::kInFlightBytes, std::max(in_flight_bytes, parts_.peers.most_pending_requests()),
      parts_.settings.handshake.limits.request_bytes);
  add("request_window_bytes", Limit::kWindow, std::max(outstanding, pending), parts_.settings.window);
  add("send_queue_bytes", Limit::kSendQueue, std::max(kept, pending), limits_.send_queue);
  add("max_waiting_messages", Limit::kWaitingMessages, waiting, limits_.waiting_messages);
  add("arena_budget_bytes", Limit::kArenas, parts_.budget->used(), parts_.budget->limit(), parts_.budget->refused());
  add("shared_memory_bytes", Limit::kLeased, leased, parts_.settings.handshake.limits.leased);
  add("max_peers", Limit::kPeers, parts_.peers.count(), limits_.peers);
  add("max_unauthenticated", Limit::kUnauthenticated, unauthenticated, parts_.peers.max_unauthenticated());
  add("max_header_bytes", Limit::kHeader, largest_body_.load(), parts_.settings.handshake.limits.body);
  add("max_message_bytes", Limit::kMessage, largest_segments_.load(), parts_.settings.handshake.limits.message);
  add("interned_names", Limit::kNames, names, kMaxNames);
  add("unacknowledged_bytes", Limit::kUnacknowledged, copied, kMaxUnacknowledged);
}

void Peers::describe(Snapshot& out) const {
  for (const auto& [id, peer] : peers_) {
    out.peers.push_back({.id = id,
                         .name = peer.identity.name,
                         .incarnation = peer.agreement.incarnation(),
                         .connection = peer.connection ? peer.connection->id : 0,
                         .epoch = peer.epoch,
                         .connecting = peer.connecting,
                         .pending = peer.pending.size(),
                         .last_error = peer.last_error.text});
  }
  for (const auto& [id, c] : connections_) {
    out.connections.push_back({.id = id,
                               .peer = c->peer,
                               .open = c->state == Connection::State::kOpen,
                               .initiator = c->initiator,
                               .stalled = c->stalled,
                               .address = c->link->describe(),
                               .source = c->source,
                               .lanes = c->link->lanes(),
                               .unprocessed = c->outstanding});
  }
}

}  // namespace telegrad
