// Attempts to connect that fail with other exceptions than those of system calls.
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "tests/workers.h"

namespace {

std::atomic<bool> fails = false;
telegrad::test::Counter failures;

}  // namespace

/// Replaces that of the C library, of which a handshake gets its nonce: it returns nothing while `fails`.
extern "C" ssize_t getrandom(void* buffer, size_t size, unsigned flags) {
  if (fails) {
    failures.add();
    return -1;
  }
  return ::syscall(SYS_getrandom, buffer, size, flags);
}

namespace telegrad::test {
namespace {

/// The first attempt is in the caller's thread, the others in that of the timer.
CASE(a_dial_without_random_bytes_is_repeated) {
  Worker a(0), b(1);
  introduce({&a, &b}, "unix");
  fails = true;
  a.start(1, 7, {.body = "x"});
  failures.wait_for(3);
  fails = false;
  a.completion_count.wait_for(1);
  CHECK(a.completions.at(7).status == CallStatus::kReplied);
}

}  // namespace
}  // namespace telegrad::test
