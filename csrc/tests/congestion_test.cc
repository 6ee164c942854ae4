// TCP without pacing on short paths, and with the system's default on long ones. The default depends on the machine.
#include "transports/tcp/congestion.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <string>

#include "base/unique_fd.h"
#include "tests/links.h"

namespace telegrad::test {
namespace {

std::string used_by(int socket) {
  char name[17] = {};
  socklen_t size = 16;
  CHECK_EQ(getsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, name, &size), 0);
  return name;
}

std::string of_the_system() { return used_by(UniqueFd(::socket(AF_INET, SOCK_STREAM, 0)).get()); }

CASE(known_controls_that_pace) {
  for (const char* name : {"bbr", "bbr2", "bbr3"}) CHECK(paces(name));
  for (const char* name : {"cubic", "reno", "dctcp", ""}) CHECK(!paces(name));
}

CASE(both_ends_of_a_fresh_link_send_without_pacing) {
  const std::string system = of_the_system();
  Ends e("tcp");
  for (const Link* link : {e.a.get(), e.b.get()}) {
    const std::string used = used_by(link->fd());
    CHECK(!paces(used));
    if (!paces(system)) CHECK_EQ(used, system);  // it is not changed then
  }
}

CASE(a_long_path_gets_the_default_of_the_system) {
  Ends e("tcp");
  const std::string before = used_by(e.a->fd());
  select_congestion_control(e.a->fd(), kMaxUnpacedRoundTrip);
  CHECK_EQ(used_by(e.a->fd()), before);
  select_congestion_control(e.a->fd(), kMaxUnpacedRoundTrip + 1);
  CHECK_EQ(used_by(e.a->fd()), of_the_system());
}

CASE(loopback_is_short) {
  Ends e("tcp");
  const std::string before = used_by(e.a->fd());
  RecordingInbox inbox;
  Random random(1);
  send_whole(*e.a, random_message(random, 10, {3 << 20}), *e.b, inbox);
  CHECK_EQ(used_by(e.a->fd()), before);
}

}  // namespace
}  // namespace telegrad::test
