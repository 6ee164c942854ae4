// Coalescing: messages of a burst that a link has buffered when something else happens.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

/// A worker without pool threads, and a puppet connected to it: no thread polls.
struct Stage {
  Stage() : a(0, {}, 0), p(1) { p.meet(a); }
  std::uint64_t burst(int length, const std::string& body) {
    std::uint64_t last = 0;
    for (int n = 0; n < length; ++n) {
      last = a.start(1, length, {.tag = kNoAnswer, .body = body, .never_wait = true});
    }
    return last;
  }
  Worker a;
  Puppet p;
};

/// A descriptor that the child opens may have the number of its parent's link.
CASE(a_forked_child_does_not_send_its_parents_buffered_messages) {
  for (int round = 0; round < 20; ++round) {
    Stage s;
    const std::uint64_t call = s.burst(30, "x");
    const int descriptors = open_descriptors();
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      int ends[2];
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) _exit(1);
      for (int i = 0; i < descriptors; ++i) {
        if (dup(ends[0]) < 0) _exit(1);
      }
      Completion o;
      s.a.engine->wait(call, kNever, {}, o);
      _exit(polls(ends[1], POLLIN, 0) ? 2 : 0);
    }
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    for (int n = 0; n < 30; ++n) CHECK_EQ(std::string(s.p.receive().body_view()), "x");
  }
}

}  // namespace
}  // namespace telegrad::test
