#include "core/call_slab.h"

namespace telegrad {

std::uint64_t CallSlab::open(std::int32_t peer) {
  if (free_.empty()) {
    if (size_ % kSlotsPerBlock == 0) blocks_.push_back(std::make_unique<Call[]>(kSlotsPerBlock));
    free_.push_back(size_++);
  }
  const std::uint32_t index = free_.back();
  free_.pop_back();
  Call& call = at(index);
  call.used = true;
  call.status = CallStatus::kPending;
  call.peer = peer;
  ++used_;
  return id_of(index);
}

void CallSlab::close(std::uint64_t id) {
  Call* call = find(id);
  clear_deadline(*call);
  if (call->counted) --async_;
  const std::uint32_t generation = call->generation + 1;
  std::destroy_at(call);  // an assignment would move each member of a new call
  std::construct_at(call);
  call->generation = generation == 0 ? 1 : generation;
  free_.push_back(static_cast<std::uint32_t>((id & 0xffffffff) - 1));
  --used_;
}

void CallSlab::set_deadline(std::uint64_t id, Nanos deadline) {
  if (deadline == kNever) return;
  Call* call = find(id);
  call->deadline = deadlines_.emplace_hint(deadlines_.end(), deadline, id);
  call->has_deadline = true;
}

void CallSlab::clear_deadline(Call& call) {
  if (call.has_deadline) deadlines_.erase(call.deadline);
  call.has_deadline = false;
}

std::uint64_t CallSlab::pop_expired(Nanos at) {
  if (deadlines_.empty() || deadlines_.begin()->first > at) return 0;
  const std::uint64_t id = deadlines_.begin()->second;
  clear_deadline(*find(id));
  return id;
}

}  // namespace telegrad
