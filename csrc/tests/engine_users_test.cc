// Peers of this host whose user the kernel does not report: each may be a process of another user.
//
// This program replaces `getsockopt`, so that a case can hide the users.
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "tests/workers.h"

namespace telegrad::test {
namespace {

std::atomic<bool> users_are_hidden = false;

const std::string kWhy = "it may be a process of another user of this host: Protocol not available";

CASE(a_process_of_an_unknown_user_is_not_accepted) {
  Worker a(0);
  a.listen("unix");
  users_are_hidden = true;
  const auto link = connect_to(a.address().addresses[0]);
  RecordingInbox inbox;
  receive_until_broken(*link, inbox);
  users_are_hidden = false;
  CHECK(inbox.messages.empty());
  CHECK_SAYS(a.wait_for_event(EventKind::kLog), kWhy);
}

CASE(a_process_of_an_unknown_user_gets_no_proof) {
  Worker a(0);
  Puppet p(1);
  a.engine->set_peer(p.address());
  users_are_hidden = true;
  Completion completion;
  std::thread caller([&] { completion = a.call(1, {.body = "x"}); });
  CHECK(readable(p.listener->fd()));
  p.link = p.listener->accept();
  Handshake handshake = Handshake::accept(p.config);
  const Incoming hello = p.receive();
  const Handshake::Step challenge = handshake.on_frame(hello.header.type, hello.body_view());
  p.send(message(*challenge.send, challenge.body));
  p.wait_for_end();
  caller.join();
  users_are_hidden = false;
  CHECK(completion.status == CallStatus::kUnreachable);
  CHECK_SAYS(completion.why, kWhy);
}

}  // namespace
}  // namespace telegrad::test

extern "C" int getsockopt(int fd, int level, int name, void* value, socklen_t* size) noexcept {
  if (name == SO_PEERCRED && level == SOL_SOCKET && telegrad::test::users_are_hidden) {
    errno = ENOPROTOOPT;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_getsockopt, fd, level, name, value, size));
}
