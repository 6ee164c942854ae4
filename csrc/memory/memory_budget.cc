#include "memory/memory_budget.h"

namespace telegrad {

std::atomic<MemoryUse*> MemoryUse::process_ = new MemoryUse;

}  // namespace telegrad
