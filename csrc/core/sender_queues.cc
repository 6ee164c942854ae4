// Queues of a connection: messages in order, and those that overtake a large one.
#include <utility>

#include "core/engine_parts.h"
#include "core/sender.h"

namespace telegrad {
namespace {

void attach_credit(Connection& c, FrameHeader& header) {
  header.credit = static_cast<std::uint64_t>(c.credit_due.exchange(0, std::memory_order_relaxed));
}

/// Returns the bytes that a message counts against the reply window.
std::int64_t reply_weight(const Outgoing& m) {
  return m.header.type == FrameType::kReply ? weight(m.payload_size()) : 0;
}

/// Removes the text of a name that the peer knows. If the peer keeps no more names, each message with a further one
/// defines it again. So does a large message: others are delivered before it. Returns false if the peer keeps no more.
bool name_for_peer(Connection& c, Outgoing& m) REQUIRES(c.send_mutex) {
  const std::uint32_t name = m.header.name_id;
  if (name <= kMaxNames) {
    if (c.names_sent.size() <= name) c.names_sent.resize(name + 64);
    if (c.names_sent[name]) {
      m.name = {};
      return true;
    }
    if (!m.large && c.name_bytes_sent + m.name.size() <= kMaxNameBytes) {
      c.names_sent[name] = true;
      c.name_bytes_sent += m.name.size();
      c.names_defined.fetch_add(1, std::memory_order_relaxed);
      return true;
    }
  }
  m.header.name_id = kTransientName;
  return m.large;
}

}  // namespace

/// Completes a message whose sending begins. A large one must not define a name or carry credit, because later messages
/// are delivered before it.
void Sender::prepare(Connection& c, Outgoing& m) {
  if (std::exchange(m.prepared, true)) return;
  if (m.header.name_id != 0 && !name_for_peer(c, m)) parts_.overload.count(Limit::kNames);
  if (!is_handshake(m.header.type) && !m.large) attach_credit(c, m.header);
}

/// Counts a queued message that no thread waits for.
void Sender::keep(Connection& c, Outgoing& m) {
  m.kept_weight = weight(m.payload_size());
  c.kept_bytes.fetch_add(m.kept_weight, std::memory_order_relaxed);
  if (!m.admitted) c.forced_bytes.fetch_add(m.kept_weight, std::memory_order_relaxed);
}

/// Appends a message to the queue of its transmission.
void Sender::enqueue(Connection& c, std::unique_ptr<Outgoing>&& m, Transmission& p) {
  m->queued_weight = reply_weight(*m);
  c.unsent_replies.fetch_add(m->queued_weight, std::memory_order_relaxed);
  if (is_kept(*m)) keep(c, *m);
  if (p.queue == &c.queue) {
    c.order.add(m->header);
    c.queued_large += m->large;
  }
  p.queue->entries.push_back({std::move(m), c.next_entry++});
  p.ticket = ++p.queue->queued;
  note_front(c);
}

/// Records the large reply that is being sent: it is no reason to hold requests.
void Sender::note_front(Connection& c) {
  const bool large = !c.queue.empty() && c.queue.front().large;
  c.large_reply.store(large ? c.queue.front().queued_weight : 0, std::memory_order_relaxed);
}

/// Removes the first message of a queue, which has been sent.
std::unique_ptr<Outgoing> Sender::dequeue(Connection& c, SendQueue& queue) {
  std::unique_ptr<Outgoing> m = std::move(queue.entries.front().message);
  queue.entries.pop_front();
  queue.flushed.fetch_add(1, std::memory_order_release);
  c.unsent_replies.fetch_sub(m->queued_weight, std::memory_order_relaxed);
  c.kept_bytes.fetch_sub(m->kept_weight, std::memory_order_relaxed);
  if (!m->admitted) c.forced_bytes.fetch_sub(m->kept_weight, std::memory_order_relaxed);
  if (&queue == &c.queue) {
    c.order.remove(m->header);
    c.queued_large -= m->large;
    c.large_unsent.fetch_sub(m->request_weight, std::memory_order_relaxed);
    note_front(c);
  }
  return m;
}

/// Returns the queue whose first message is to be sent next: `overtaking`, unless messages before it are not large.
SendQueue& Sender::next_queue(Connection& c) {
  if (c.overtaking.empty()) return c.queue;
  if (c.queue.empty()) return c.overtaking;
  if (c.queue.front().large) return c.link->takes_between() ? c.overtaking : c.queue;
  return c.queue.entries.front().number < c.overtaking.entries.front().number ? c.queue : c.overtaking;
}

}  // namespace telegrad
