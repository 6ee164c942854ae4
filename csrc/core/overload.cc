#include "core/overload.h"

#include <algorithm>
#include <utility>

#include "core/engine_parts.h"
#include "core/left_out.h"

namespace telegrad {

Overload::Overload(EngineParts& parts, const LoadLimits& limits, const Limits& of_peers)
    : parts_(parts),
      limits_(limits),
      hard_requests_(kHardFactor * std::int64_t{of_peers.requests} + kHardRequests),
      hard_request_bytes_(kHardFactor * static_cast<std::int64_t>(std::min(of_peers.request_bytes, kMostBytes)) +
                          kHardBytes) {}

// ---- at the caller

bool Overload::reject(std::uint64_t id, std::int32_t peer, std::int64_t size, Outgoing& m, const CallOptions& o,
                      Released& released) {
  if (m.header.flags & kLeftOut) return false;
  std::string why = reason(peer, size, m, o);
  return !why.empty() && fail(id, std::move(why), m, released);
}

std::string Overload::reason(std::int32_t peer, std::int64_t size, const Outgoing& m, const CallOptions& o) {
  if (o.depth > limits_.call_depth) {
    count(Limit::kCallDepth);
    return "max_call_depth: the call is made inside " + number(o.depth) + " nested calls, and " +
           number(limits_.call_depth) + " are allowed. Do the functions call each other without end? If not, raise " +
           "the option.";
  }
  const Peer* found = parts_.peers.find(peer);
  if (!found || found->removed) return "";
  const std::string& name = found->identity.name;
  const bool is_awaited = !o.never_wait && !m.segments.empty() && !m.immutable;  // the caller waits until it is sent
  const std::int64_t kept =
      found->connection ? found->connection->kept_bytes.load(std::memory_order_relaxed) : found->pending.kept_bytes();
  if (!is_awaited && is_queue_full(kept, size)) {
    count(Limit::kSendQueue);
    const std::string to = found->connection
                               ? " bytes already wait to be sent to worker " + name + ", which reads too slowly"
                               : " bytes already wait for a connection to worker " + name;
    return "send_queue_bytes: " + number(static_cast<std::uint64_t>(kept)) + to + "; the limit is " +
           number(limits_.send_queue) + ". Await some results before making more calls, or raise the option.";
  }
  if (!o.nested && !o.never_wait) return "";  // it waits
  if (found->connection && !parts_.sender.has_free_request(*found->connection)) {
    count(Limit::kInFlight);
    return "max_in_flight: worker " + name + " has not replied to " + number(found->connection->max_in_flight) +
           " requests, and this call cannot wait, because it is made inside a handler, in a callback or on an event "
           "loop. Await some results before making more calls.";
  }
  const bool has_bytes =
      found->connection ? parts_.sender.has_free_bytes(*found->connection, size) : has_free_bytes(found->pending, size);
  if (!has_bytes) {
    count(Limit::kInFlightBytes);
    const std::int64_t used =
        found->connection ? found->connection->in_flight_bytes.total() : found->pending.request_bytes();
    return "max_in_flight_bytes: worker " + name + " has not replied to requests of " +
           number(static_cast<std::uint64_t>(used)) + " bytes, and this call of " +
           number(static_cast<std::uint64_t>(size)) +
           " bytes cannot wait, because it is made inside a handler, in a callback or on an event loop. Await some "
           "results before making more calls, or raise the option on both workers.";
  }
  if (!found->connection && found->pending.size() >= max_waiting()) {
    count(Limit::kWaitingMessages);
    return "max_waiting_messages: " + number(found->pending.size()) + " messages already wait for a connection to " +
           "worker " + name + ", and this call cannot wait, because it is made inside a handler, in a callback or on " +
           "an event loop. Await some results before making more calls.";
  }
  return "";
}

bool Overload::reject_pending(std::uint64_t id, const Connection& c, std::size_t earlier, Outgoing& m,
                              Released& released) {
  if (m.header.flags & kLeftOut) return false;
  const std::int64_t most = c.max_in_flight + kHardRequests;
  const std::string& name = c.handshake.peer().name;
  const std::int64_t size = weight(m.payload_size());
  if (RequestBytes::is_counted(size) && !c.in_flight_bytes.has_room(size, kHardFactor * c.max_in_flight_bytes)) {
    count(Limit::kInFlightBytes);
    return fail(id,
                "max_in_flight_bytes: more bytes of requests waited for the connection to worker " + name +
                    " than the " + number(c.limits.request_bytes) +
                    " that it admits. Await some results before making more calls, or raise the option on " + name +
                    ".",
                m, released);
  }
  if (static_cast<std::int64_t>(earlier) < most) return false;
  count(Limit::kInFlight);
  return fail(id,
              "max_in_flight: more requests waited for the connection to worker " + name + " than the " +
                  number(c.limits.requests) + " that it admits. Await some results before making more calls, or " +
                  "raise the option on " + name + ".",
              m, released);
}

/// Fails a call. Returns false if its request is sent without its content, because the peer counts on its trailer.
bool Overload::fail(std::uint64_t id, std::string why, Outgoing& m, Released& released) {
  if (m.header.flags & kMustDeliver && m.header.flags & kTrailer) {
    leave_out(m, LeftOut::kOverloaded, why);
    return false;
  }
  parts_.calls.release_keep_alive(id, released);
  parts_.calls.complete(id, Completion{.status = CallStatus::kOverloaded, .why = std::move(why)}, released);
  return true;
}

bool Overload::has_room(std::int32_t peer, std::int64_t size) {
  const Peer* found = parts_.peers.find(peer);
  if (!found || found->removed) return true;
  if (found->connection) return parts_.sender.window_open(*found->connection, size);
  return found->pending.size() < max_waiting() && parts_.sender.window_open(found->pending, size) &&
         has_free_bytes(found->pending, size);
}

/// Returns whether a large request may wait for a connection: the peer should admit it when it opens.
bool Overload::has_free_bytes(const PendingMessages& pending, std::int64_t size) const {
  const auto limit = static_cast<std::int64_t>(std::min(parts_.settings.handshake.limits.request_bytes, kMostBytes));
  return !RequestBytes::is_counted(size) || RequestBytes::has_room(pending.request_bytes(), size, limit);
}

/// Returns the number of messages that may wait for a connection: it should admit them when it opens.
std::uint64_t Overload::max_waiting() const {
  return std::min<std::uint64_t>(limits_.waiting_messages, parts_.settings.handshake.limits.requests);
}

// ---- queues

std::int64_t Overload::hard_queue() const {
  return kHardFactor * static_cast<std::int64_t>(limits_.send_queue) + kHardBytes;
}

/// Small replies keep their content: the caller counts on what they say.
bool Overload::leave_out_reply(const Connection& c, Outgoing& m) {
  count(Limit::kSendQueue);
  leave_out(m, LeftOut::kOverloaded,
            "send_queue_bytes: " + number(static_cast<std::uint64_t>(c.kept_bytes)) +
                " bytes of results already wait to be sent to worker " + c.handshake.peer().name +
                ", which reads too slowly; the limit is " + number(limits_.send_queue) + " on worker " +
                parts_.settings.handshake.me.name +
                ". Make fewer calls with large results at once, or raise the option there.");
  return true;
}

void Overload::end_later(const ConnectionPtr& c) {
  if (std::exchange(c->overfull, true)) return;
  Lock lock(parts_.mutex);
  overfull_.push_back(c);
  parts_.timer.arm(now());
}

std::vector<std::pair<ConnectionPtr, std::string>> Overload::take_overfull() {
  std::vector<std::pair<ConnectionPtr, std::string>> all;
  for (const ConnectionPtr& c : std::exchange(overfull_, {})) {
    count(Limit::kSendQueue);
    all.emplace_back(c, number(static_cast<std::uint64_t>(c->forced_bytes)) +
                            " bytes of messages that are always sent wait for it (option send_queue_bytes: " +
                            number(limits_.send_queue) +
                            "). It reads more slowly than this worker sends: await results before making more calls, "
                            "raise the option, or find out whether its process is stopped.");
  }
  return all;
}

std::string Overload::pending_reason(const Peer& peer) {
  const PendingMessages& pending = peer.pending;
  const bool many = pending.forced() >= static_cast<std::size_t>(kHardFactor) * limits_.waiting_messages;
  if (!many && pending.forced_bytes() <= hard_queue()) return "";
  count(many ? Limit::kWaitingMessages : Limit::kSendQueue);
  const std::string what = many ? number(pending.forced()) + " messages"
                                : number(static_cast<std::uint64_t>(pending.forced_bytes())) + " bytes of messages";
  const std::string option = many ? "max_waiting_messages: " + number(limits_.waiting_messages)
                                  : "send_queue_bytes: " + number(limits_.send_queue);
  return what + " that are always sent wait for a connection to it (option " + option +
         "). Find out why it cannot be reached, or raise the option.";
}

// ---- at the callee

void Overload::leave_out_deep(Incoming& request) {
  // A creation without a trailer runs: its callers have checked the depth, and what it calls is checked again.
  if (!may_leave_out(request.header)) return;
  count(Limit::kCallDepth);
  leave_out(request, LeftOut::kOverloaded, *parts_.buffers,
            "max_call_depth: the call is made inside " + number(request.header.depth) + " nested calls, and worker " +
                parts_.settings.handshake.me.name + " allows " + number(limits_.call_depth) +
                ". Nest fewer calls, or raise the option on that worker.");
}

bool Overload::count_bytes(Connection& c, std::uint64_t call, std::int64_t size) const {
  if (c.unanswered_bytes.contains(call)) return false;  // its reply would free both
  if (!RequestBytes::is_counted(size)) return true;
  // One of any size may be among those of a peer that keeps the limit.
  const RequestBytes& all = c.unanswered_bytes;
  if (all.total() > hard_request_bytes_ && all.total_of_others() > hard_request_bytes_) return false;
  c.unanswered_bytes.add(call, size);
  return true;
}

std::string Overload::bytes_reason() {
  count(Limit::kInFlightBytes);
  return "it sent more than " + number(static_cast<std::uint64_t>(hard_request_bytes_)) +
         " bytes of requests without waiting for replies, or one call twice (option max_in_flight_bytes: " +
         number(parts_.settings.handshake.limits.request_bytes) + ")";
}

void Overload::record_segments(const Incoming& m, std::uint64_t size) {
  if (m.header.flags & kTrailer) size -= m.segments.back()->size();
  if (size > largest_segments_.load(std::memory_order_relaxed))
    largest_segments_.store(size, std::memory_order_relaxed);
}

std::string Overload::flood_reason() {
  count(Limit::kInFlight);
  return "it sent " + number(static_cast<std::uint64_t>(hard_requests_)) +
         " requests without waiting for replies (option max_in_flight: " +
         number(parts_.settings.handshake.limits.requests) + ")";
}

std::string Overload::peer_reason() {
  if (parts_.peers.count() < limits_.peers) return "";
  count(Limit::kPeers);
  const std::string& me = parts_.settings.handshake.me.name;
  return "it would be worker number " + number(parts_.peers.count() + 1) + " that worker " + me +
         " remembers (option max_peers: " + number(limits_.peers) + "). Raise the option on " + me +
         ", or let other workers leave first.";
}

}  // namespace telegrad
