// Conformance suite of the transport contract (core/transport.h): the end of a link, and connecting.
#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <system_error>
#include <thread>

#include "base/peer_credentials.h"
#include "tests/transport_suite.h"

namespace telegrad::test {
namespace {

// ---- end of the link

void sent_data_survives_close(Scheme scheme) {
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(14);
  std::vector<Message> sent;
  for (int i = 0; i < 10; ++i) sent.push_back(random_message(random, 500, {1000}));
  for (const Message& m : sent) {
    Outgoing out = m.outgoing();
    CHECK(e.a->send(out) == SendState::kSent);
  }
  e.a->close();
  e.a.reset();
  receive_until_broken(*e.b, inbox);
  CHECK_EQ(inbox.messages.size(), 10u);
  for (std::size_t i = 0; i < 10; ++i) check_same(sent[i], inbox.messages[i]);
  CHECK_EQ(e.b->error().text, "");
  CHECK(receive(*e.b, inbox, kAnyBudget) == ReceiveState::kBroken);
  CHECK_EQ(inbox.messages.size(), 10u);
  CHECK_EQ(e.b->error().text, "");
  CHECK_EQ(e.b->error().code, 0);
}

/// Waits until the other end of a TCP connection has the data: a reset would drop what it has not.
void wait_until_arrived(Scheme scheme, const Link& link) {
  int bytes = 0;
  const bool tcp = scheme == "tcp" || scheme == "tls" || scheme.ends_with("lanes");
  while (tcp && ioctl(link.fd(), SIOCOUTQ, &bytes) == 0 && bytes > 0) std::this_thread::yield();
}

/// A send that fails because the other end has closed must not lose the data that the other end sent before.
void sent_data_survives_a_failed_send(Scheme scheme) {
  Ends e(scheme);
  RecordingInbox inbox;
  Random random(15);
  const Message m = random_message(random, 500, {1000});
  for (int i = 0; i < 10; ++i) {
    Outgoing out = m.outgoing();
    CHECK(e.a->send(out) == SendState::kSent);
  }
  wait_until_arrived(scheme, *e.a);
  e.a->close();
  e.a.reset();
  SendState state;
  do {
    Outgoing out = m.outgoing();
    state = e.b->send(out);
    CHECK(state != SendState::kBlocked);
  } while (state == SendState::kSent);
  CHECK(readable(*e.b, 0));
  receive_until_broken(*e.b, inbox);
  CHECK_EQ(inbox.messages.size(), 10u);
  Outgoing out = m.outgoing();
  CHECK(e.b->send(out) == SendState::kBroken);
}

void close_ends_both_directions(Scheme scheme) {
  Ends e(scheme);
  RecordingInbox inbox;
  CHECK_EQ(e.a->error().text, "");
  CHECK(receive(*e.b, inbox, kAnyBudget) == ReceiveState::kIdle);
  e.a->close();
  e.a->close();
  const Message m;
  Outgoing out = m.outgoing();
  CHECK(e.a->send(out) == SendState::kBroken);
  receive_until_broken(*e.a, inbox);
  receive_until_broken(*e.b, inbox);
  CHECK_EQ(e.b->error().text, "");
  e.a->close();
  e.b->close();
  Outgoing back = m.outgoing();
  CHECK(e.b->send(back) == SendState::kBroken);
  CHECK(inbox.messages.empty());
}

void close_wakes_both_ends(Scheme scheme) {
  for (int i = 0; i < 20; ++i) {
    Ends e(scheme);
    RecordingInbox at_a, at_b;
    std::thread reading_a([&] { receive_until_broken(*e.a, at_a); });
    std::thread reading_b([&] { receive_until_broken(*e.b, at_b); });
    std::thread closing([&] { e.a->close(); });
    e.a->close();
    closing.join();
    reading_a.join();
    reading_b.join();
    CHECK_EQ(e.b->error().text, "");
  }
}

void close_while_sending(Scheme scheme) {
  for (int i = 0; i < 10; ++i) {
    Ends e(scheme);
    RecordingInbox at_b;
    Random random(16);
    const Message m = random_message(random, 100, {200 * kKiB});
    Counter sends;
    std::thread sending([&] {
      while (true) {
        Outgoing out = m.outgoing();
        SendState state;
        while ((state = e.a->send(out)) == SendState::kBlocked) writable(*e.a);
        if (state == SendState::kBroken) return;
        sends.add();
      }
    });
    std::thread reading([&] { receive_until_broken(*e.b, at_b); });
    sends.wait_for(3);
    e.a->close();
    sending.join();
    reading.join();
    for (const Incoming& got : at_b.messages) check_same(m, got);  // complete or not at all
  }
}

void all_memory_is_released(Scheme scheme) {
  {
    Ends warm_up(scheme);
  }
  const int before = open_descriptors();
  for (int i = 0; i < 20; ++i) {
    Ends e(scheme);
    CHECK(open_descriptors() > before);
    if (i % 2) e.a->close();
    if (i % 3) e.b.reset();
  }
  {
    const std::string address = fresh_address(scheme);
    auto listener = listen_on(address);
    auto never_accepted = connect_to(listener->address());
  }
  CHECK_EQ(open_descriptors(), before);
}

// ---- connecting

void a_listener_has_an_address(Scheme scheme) {
  const std::string address = fresh_address(scheme);
  auto listener = listen_on(address);
  CHECK(listener->address().starts_with(scheme + ":"));
  CHECK(listener->accept() == nullptr);
  CHECK(!readable(listener->fd(), 0));
  std::string why;
  try {
    auto second = listen_on(listener->address());
  } catch (const std::system_error& e) {
    why = e.what();
  }
  CHECK_SAYS(why, listener->address());
}

/// Data sent before the other end accepts is signaled as well.
void sent_before_it_is_accepted(Scheme scheme) {
  const std::string address = fresh_address(scheme);
  auto listener = listen_on(address);
  auto a = connect_to(listener->address());
  Random random(19);
  const Message m = random_message(random, 100);
  Outgoing out = m.outgoing();
  SendState state;
  while ((state = a->send(out)) == SendState::kBlocked && a->waits_for_fd()) writable(a->fd());
  CHECK(readable(listener->fd()));
  auto b = listener->accept();
  CHECK(b != nullptr);
  RecordingInbox inbox;
  if (state == SendState::kBlocked) send_whole(*a, out, *b, inbox);  // encrypted: it has sent its greeting
  receive_until(*b, inbox, 1);
  check_same(m, inbox.messages[0]);
}

void an_address_without_listener(Scheme scheme) {
  const std::string address = fresh_address(scheme);
  std::string gone = listen_on(address)->address();  // closed at once
  std::string why;
  int code = 0;
  try {
    auto link = connect_to(gone);
    RecordingInbox inbox;
    const Message m;
    Outgoing out = m.outgoing();
    while (link->send(out) == SendState::kBlocked) writable(link->fd());
    receive_until_broken(*link, inbox);
    why = link->error().text;
    code = link->error().code;
  } catch (const std::system_error& e) {
    CHECK_SAYS(e.what(), gone);
    why = e.what();
    code = e.code().value();
  }
  CHECK_SAYS(why, "refused");
  CHECK_EQ(code, ECONNREFUSED);
}

/// Only where links can be resumed is this asked.
void a_refused_address(Scheme scheme) {
  const auto listener = listen_on(fresh_address(scheme));
  const std::string open = listener->address();
  const std::string gone = listen_on(fresh_address(scheme))->address();  // closed at once
  Transport* const transport = find_transport(open);
  const LinkSecurityPtr security = security_for(open);
  const bool over_tcp = scheme == "tcp" || scheme == "tls";
  CHECK_EQ(transport->is_resumable(), over_tcp);
  CHECK(!transport->is_refused(open, security));
  CHECK_EQ(transport->is_refused(gone, security), over_tcp);
}

void peer_credentials_are_reported(Scheme scheme) {
  Ends e(scheme);
  CredentialLookup lookup;
  for (const Link* link : {e.a.get(), e.b.get()}) {
    CHECK(link->describe().starts_with(scheme));
    const PeerCredentials user = link->peer_credentials(lookup);
    CHECK(user.kind == PeerCredentials::Kind::kUser);
    CHECK_EQ(user.uid, geteuid());
    CHECK_EQ(link->source(), scheme == "tcp" || scheme == "tls" ? "127.0.0.1" : "");
  }
}

const bool registered = add_on_every_scheme({
    ON_LINKS(sent_data_survives_close),
    ON_LINKS(sent_data_survives_a_failed_send),
    ON_LINKS(close_ends_both_directions),
    ON_LINKS(close_wakes_both_ends),
    ON_LINKS(close_while_sending),
    ON_LINKS(all_memory_is_released),
    ON_TRANSPORTS(a_listener_has_an_address),
    ON_TRANSPORTS(sent_before_it_is_accepted),
    ON_TRANSPORTS(an_address_without_listener),
    ON_TRANSPORTS(a_refused_address),
    ON_TRANSPORTS(peer_credentials_are_reported),
});

}  // namespace
}  // namespace telegrad::test
