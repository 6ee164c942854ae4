// TLS streams: what an attacker between two links, or at either end, can do. Every claim of SECURITY.md about encrypted
// connections that the core alone can show.
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "tests/links.h"
#include "transports/stream/stream_link.h"
#include "transports/tls/security.h"

namespace telegrad::test {
namespace {

constexpr SocketKind kKind{.peer_credentials = remote_credentials};
const std::string kKey(32, 'k');

std::pair<UniqueFd, UniqueFd> sockets() {
  int ends[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

std::unique_ptr<StreamLink> link_over(UniqueFd socket, const LinkSecurityPtr& security, bool initiator) {
  auto stream = security ? make_tls_stream(std::move(socket), security, initiator)
                         : std::make_unique<ByteStream>(std::move(socket));
  return std::make_unique<StreamLink>(std::move(stream), "test", false, kKind);
}

std::string read_available(int fd) {
  std::string all;
  char part[65536];
  for (ssize_t n; (n = ::recv(fd, part, sizeof part, MSG_DONTWAIT)) > 0;) all.append(part, static_cast<std::size_t>(n));
  return all;
}

/// Two links, and an attacker between them that passes their bytes on.
struct Wire {
  explicit Wire(const LinkSecurityPtr& at_a, const LinkSecurityPtr& at_b) {
    auto [a_end, a_wire] = sockets();
    auto [b_end, b_wire] = sockets();
    a = link_over(std::move(a_end), at_a, true);
    b = link_over(std::move(b_end), at_b, false);
    to_a = std::move(a_wire);
    to_b = std::move(b_wire);
  }
  /// Takes the bytes that a link has sent.
  std::string from_a() { return record(read_available(to_a.get())); }
  std::string from_b() { return read_available(to_b.get()); }
  std::string record(const std::string& bytes) {
    sent_by_a += bytes;
    return bytes;
  }
  static void give(const UniqueFd& to, std::string_view bytes) {
    CHECK_EQ(::send(to.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  /// Carries everything in both directions until nothing is sent any more.
  void carry() {
    for (bool any = true; any;) {
      const std::string there = from_a(), back = from_b();
      any = !there.empty() || !back.empty();
      if (!there.empty()) give(to_b, there);
      if (!back.empty()) give(to_a, back);
      at_b_state = b->receive(at_b, kAnyBudget);
      at_a_state = a->receive(at_a, kAnyBudget);
    }
  }
  /// Sends a message from `a`, whose handshake may not have ended. Returns whether it was accepted.
  bool send(const Message& m) {
    Outgoing out = m.outgoing();
    for (int turn = 0; turn < 10; ++turn) {
      const SendState state = a->send(out);
      if (state != SendState::kBlocked) return state == SendState::kSent;
      carry();
    }
    return false;
  }
  std::unique_ptr<StreamLink> a, b;
  UniqueFd to_a, to_b;
  RecordingInbox at_a, at_b;
  ReceiveState at_a_state{}, at_b_state{};
  std::string sent_by_a;
};

LinkSecurityPtr with_key(const std::string& key = kKey) { return make_tls({.key = key}); }

Message some_message(std::size_t size = 1000) {
  Random random(size);
  return random_message(random, 100, {size});
}

/// A wire on which one message has arrived.
struct Established : Wire {
  explicit Established(const LinkSecurityPtr& security = with_key()) : Wire(security, security) {
    CHECK(send(some_message()));
    carry();
    CHECK_EQ(at_b.messages.size(), 1u);
    check_same(some_message(), at_b.messages[0]);
    at_b.messages.clear();
  }
  /// Takes the encrypted bytes of one more message.
  std::string encrypted(const Message& m) {
    Outgoing out = m.outgoing();
    CHECK(a->send(out) == SendState::kSent);
    return from_a();
  }
};

CASE(an_observer_reads_nothing) {
  Established wire;
  Message m = some_message();
  m.segments[0] = std::string(1000, 'S');
  const std::string bytes = wire.encrypted(m);
  CHECK(bytes.size() > 1000);
  CHECK(bytes.find("SSSS") == std::string::npos);
  CHECK(wire.sent_by_a.find("TGR1") == std::string::npos);
}

CASE(every_flipped_byte_ends_the_link_without_data) {
  const std::size_t size = Established().encrypted(some_message()).size();
  for (std::size_t at = 0; at < size; at += 7) {
    Established wire;
    std::string bytes = wire.encrypted(some_message());
    bytes[at] = static_cast<char>(bytes[at] ^ 1);
    Wire::give(wire.to_b, bytes);
    const ReceiveState state = wire.b->receive(wire.at_b, kAnyBudget);
    CHECK(wire.at_b.messages.empty());
    if (state == ReceiveState::kBroken) continue;
    CHECK(at == 3 || at == 4);  // the length of the record: it waits for the rest
    wire.to_b = UniqueFd();
    CHECK(wire.b->receive(wire.at_b, kAnyBudget) == ReceiveState::kBroken);
    CHECK(wire.at_b.messages.empty());
  }
}

/// A bad record directly after a good one is reported at once, although the socket has no more data then.
CASE(a_bad_record_after_a_good_one) {
  Established wire;
  std::string bytes = wire.encrypted(some_message());
  std::string bad = wire.encrypted(some_message());
  bad.back() = static_cast<char>(bad.back() ^ 1);
  Wire::give(wire.to_b, bytes + bad);
  CHECK(wire.b->receive(wire.at_b, kAnyBudget) == ReceiveState::kBroken);
  CHECK_EQ(wire.at_b.messages.size(), 1u);
  CHECK_SAYS(wire.b->error().text, "not authentic");
  CHECK_EQ(wire.b->error().code, EPROTO);
}

CASE(a_truncated_record_delivers_nothing) {
  const std::size_t size = Established().encrypted(some_message()).size();
  for (const std::size_t left : {std::size_t{1}, std::size_t{5}, size / 2, size - 1}) {
    Established wire;
    Wire::give(wire.to_b, wire.encrypted(some_message()).substr(0, left));
    CHECK(wire.b->receive(wire.at_b, kAnyBudget) == ReceiveState::kIdle);
    wire.to_b = UniqueFd();
    CHECK(wire.b->receive(wire.at_b, kAnyBudget) == ReceiveState::kBroken);
    CHECK(wire.at_b.messages.empty());
  }
}

/// Another thread may send before the link knows of the end. The connection has broken, and nothing was changed.
CASE(a_write_after_the_end_of_the_socket) {
  auto [a_end, b_end] = sockets();
  const LinkSecurityPtr security = with_key();
  const auto a = make_tls_stream(std::move(a_end), security, true);
  const auto b = make_tls_stream(std::move(b_end), security, false);
  char sent = 'x', received[8];
  const iovec out{&sent, 1}, in{received, sizeof received};
  for (int turn = 0; turn < 10 && a->write(&out, 1) != 1; ++turn) {
    b->read(&in, 1, true);
    a->read(&in, 1, true);
  }
  CHECK_EQ(b->read(&in, 1, true), 1);
  CHECK_EQ(::shutdown(b->fd(), SHUT_WR), 0);  // the socket takes what `a` sends
  CHECK_EQ(a->read(&in, 1, true), 0);
  CHECK_EQ(a->write(&out, 1), -1);
  CHECK_EQ(errno, EPIPE);
  CHECK_EQ(a->error().text, "");
}

CASE(records_cannot_be_dropped_repeated_or_reordered) {
  for (const std::string how : {"dropped", "repeated", "reordered"}) {
    Established wire;
    const std::string one = wire.encrypted(some_message()), two = wire.encrypted(some_message());
    Wire::give(wire.to_b, how == "dropped" ? two : how == "repeated" ? one + one : two + one);
    CHECK(wire.b->receive(wire.at_b, kAnyBudget) == ReceiveState::kBroken);
    CHECK(wire.at_b.messages.size() == (how == "repeated" ? 1u : 0u));
  }
}

CASE(a_recorded_connection_cannot_be_replayed) {
  Established recorded;
  const LinkSecurityPtr security = with_key();
  auto [end, attacker] = sockets();
  auto link = link_over(std::move(end), security, false);
  RecordingInbox inbox;
  Wire::give(attacker, recorded.sent_by_a);
  CHECK(link->receive(inbox, kAnyBudget) == ReceiveState::kBroken);
  CHECK(inbox.messages.empty());
}

CASE(another_key) {
  Wire wire(with_key(), with_key(std::string(32, 'x')));
  CHECK(!wire.send(some_message()));
  wire.carry();
  CHECK(wire.at_a_state == ReceiveState::kBroken && wire.at_b_state == ReceiveState::kBroken);
  CHECK_SAYS(wire.a->error().text, "refused by the peer, which logs the reason: this worker has another secret");
  CHECK_SAYS(wire.b->error().text, "secret does not match");
  CHECK_EQ(wire.a->error().code, kRefusalCode);
  CHECK_EQ(wire.b->error().code, kRefusalCode);
  CHECK(wire.at_b.messages.empty());
}

/// Whatever is wrong with its greeting, an unauthenticated peer gets the same bytes.
CASE(unauthenticated_peers_get_one_alert) {
  Wire other(with_key(std::string(32, 'x')), nullptr);
  Outgoing out = some_message().outgoing();
  CHECK(other.a->send(out) == SendState::kBlocked);
  const std::string wrong_key = other.from_a();
  std::string no_key = wrong_key;  // under another name
  no_key.replace(no_key.find("telegrad"), 8, "outsider");
  for (const std::string& greeting :
       {wrong_key, no_key, std::string("GET / HTTP/1.1\r\n\r\n"), "TGR1" + std::string(100, '\0'),
        std::string("\x16\x03\x01\x00\x04\x55\x00\x00\x00", 9), std::string(300, '\xff')}) {
    auto [end, outsider] = sockets();
    auto link = link_over(std::move(end), with_key(), false);
    RecordingInbox inbox;
    Wire::give(outsider, greeting);
    if (link->receive(inbox, kAnyBudget) != ReceiveState::kBroken) fail(__FILE__, __LINE__, "accepted: " + greeting);
    CHECK(read_available(outsider.get()) == std::string("\x15\x03\x03\x00\x02\x02\x28", 7));
    CHECK(!link->error().text.empty());
  }
}

CASE(a_plain_initiator_is_refused) {
  Wire wire(nullptr, with_key());
  CHECK(wire.send(some_message()));
  wire.carry();
  CHECK(wire.at_b_state == ReceiveState::kBroken && wire.at_b.messages.empty());
  CHECK_SAYS(wire.b->error().text, "does not use TLS 1.3: give all workers the same option encryption");
  wire.to_a = UniqueFd();
  receive_until_broken(*wire.a, wire.at_a);
  CHECK_SAYS(wire.a->error().text, "the other end encrypts, and this one does not");
}

CASE(a_plain_acceptor_is_refused) {
  Wire wire(with_key(), nullptr);
  Outgoing out = some_message().outgoing();
  CHECK(wire.a->send(out) == SendState::kBlocked);
  CHECK(!wire.a->waits_for_fd());
  Wire::give(wire.to_a, "TGR1 in plain text");
  CHECK(wire.a->receive(wire.at_a, kAnyBudget) == ReceiveState::kBroken);
  CHECK_SAYS(wire.a->error().text, "does not use TLS 1.3");
  CHECK(wire.a->send(out) == SendState::kBroken);
}

/// Like every reset, this does not mean that no worker is at the address.
CASE(a_peer_that_closes_in_the_handshake) {
  for (const bool reads : {false, true}) {
    Wire wire(with_key(), nullptr);
    Outgoing out = some_message().outgoing();
    CHECK(wire.a->send(out) == SendState::kBlocked);
    if (reads) wire.from_a();
    wire.to_a = UniqueFd();
    CHECK(wire.a->receive(wire.at_a, kAnyBudget) == ReceiveState::kBroken);
    CHECK_SAYS(wire.a->error().text, "has closed the connection in the TLS handshake");
    CHECK_EQ(wire.a->error().code, ECONNRESET);
  }
}

/// Keys change in time, and messages of all sizes arrive whole.
CASE(keys_are_updated) {
  const LinkSecurityPtr security = make_tls({.key = kKey, .key_update = 10'000});
  Established wire(security);
  for (const std::size_t size : {10, 9'000, 20'000, 200'000, 5}) {
    CHECK(wire.send(some_message(size)));
    wire.carry();
    CHECK_EQ(wire.at_b.messages.size(), 1u);
    check_same(some_message(size), wire.at_b.messages[0]);
    wire.at_b.messages.clear();
  }
}

// ---- certificates

struct Pem {
  std::string certificate, key;
};

using KeyPtr = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
using CertificatePtr = std::unique_ptr<X509, decltype(&X509_free)>;

/// An authority that signs certificates into files of a folder.
class Authority {
 public:
  explicit Authority(std::string name) : folder_(std::filesystem::temp_directory_path() / ("tg-tls-" + name)) {
    std::filesystem::create_directories(folder_);
    certificate_ = make(name, key_.get(), nullptr, true);
    write("ca.pem", [&](FILE* f) { PEM_write_X509(f, certificate_.get()); });
  }
  ~Authority() { std::filesystem::remove_all(folder_); }

  /// Returns the settings of a worker with a certificate for `name`, in the common name or as a DNS name.
  TlsSettings issue(const std::string& name, bool as_dns_name = false, int days = 1) {
    const KeyPtr key(EVP_EC_gen("P-256"), EVP_PKEY_free);
    const auto certificate = make(as_dns_name ? "-" : name, key.get(), as_dns_name ? &name : nullptr, false, days);
    const std::string file = std::to_string(++issued_);
    write(file + ".pem", [&](FILE* f) { PEM_write_X509(f, certificate.get()); });
    write(file + ".key", [&](FILE* f) { PEM_write_PrivateKey(f, key.get(), nullptr, nullptr, 0, nullptr, nullptr); });
    return {.certificate = path(file + ".pem"), .private_key = path(file + ".key"), .authority = path("ca.pem")};
  }

 private:
  CertificatePtr make(const std::string& name, EVP_PKEY* key, const std::string* dns, bool authority, int days = 1) {
    CertificatePtr c(X509_new(), X509_free);
    X509_set_version(c.get(), X509_VERSION_3);
    ASN1_INTEGER_set(X509_get_serialNumber(c.get()), 1 + issued_);
    X509_gmtime_adj(X509_getm_notBefore(c.get()), -86400 * 2);
    X509_gmtime_adj(X509_getm_notAfter(c.get()), 86400 * days);
    X509_set_pubkey(c.get(), key);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(c.get()), "CN", MBSTRING_UTF8,
                               reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
    X509_set_issuer_name(c.get(), X509_get_subject_name(authority ? c.get() : certificate_.get()));
    const auto extend = [&](int what, const std::string& value) {
      X509_EXTENSION* const e = X509V3_EXT_conf_nid(nullptr, nullptr, what, value.c_str());
      X509_add_ext(c.get(), e, -1);
      X509_EXTENSION_free(e);
    };
    if (authority) extend(NID_basic_constraints, "critical,CA:TRUE");
    if (dns) extend(NID_subject_alt_name, "DNS:" + *dns);
    CHECK(X509_sign(c.get(), key_.get(), EVP_sha256()) > 0);
    return c;
  }
  template <class Write>
  void write(const std::string& name, Write content) {
    FILE* const f = std::fopen(path(name).c_str(), "w");
    CHECK(f != nullptr);
    content(f);
    std::fclose(f);
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  const std::filesystem::path folder_;
  const KeyPtr key_{EVP_EC_gen("P-256"), EVP_PKEY_free};
  CertificatePtr certificate_{nullptr, X509_free};
  int issued_ = 0;
};

CASE(certificates_of_one_authority) {
  Authority authority("one");
  Wire wire(make_tls(authority.issue("w0")), make_tls(authority.issue("w1", true)));
  CHECK(wire.send(some_message()));
  wire.carry();
  CHECK_EQ(wire.at_b.messages.size(), 1u);
  CHECK(wire.a->is_certified_for("w1") && wire.b->is_certified_for("w0"));
  for (const std::string name : {"w0", "w", "w12", "W1", "-x", ""}) CHECK(!wire.a->is_certified_for(name));
}

/// The acceptor's log has the reason; the initiator does not get it.
CASE(a_certificate_of_another_authority) {
  Authority authority("one"), another("two");
  TlsSettings mixed = another.issue("w0");
  mixed.authority = authority.issue("w0").authority;  // it accepts the acceptor
  Wire wire(make_tls(mixed), make_tls(authority.issue("w1")));
  wire.send(some_message());
  wire.carry();
  CHECK(wire.at_b_state == ReceiveState::kBroken && wire.at_a_state == ReceiveState::kBroken);
  CHECK(wire.at_b.messages.empty());
  CHECK_SAYS(wire.b->error().text, "the certificate of the other end is not accepted");
  CHECK_SAYS(wire.a->error().text, "refused by the peer, which logs the reason");
  CHECK(wire.a->error().text.find("handshake failure") != std::string::npos);

  Wire reverse(make_tls(authority.issue("w0")), make_tls(another.issue("w1")));
  CHECK(!reverse.send(some_message()));
  CHECK_SAYS(reverse.a->error().text, "the certificate of the other end is not accepted");
}

CASE(an_expired_certificate) {
  Authority authority("one");
  Wire wire(make_tls(authority.issue("w0", false, -1)), make_tls(authority.issue("w1")));
  wire.send(some_message());
  wire.carry();
  CHECK(wire.at_b_state == ReceiveState::kBroken && wire.at_b.messages.empty());
  CHECK_SAYS(wire.b->error().text, "expired");
}

CASE(a_key_where_certificates_are_required) {
  Authority authority("one");
  for (const bool from_key : {true, false}) {
    const LinkSecurityPtr certified = make_tls(authority.issue("w1"));
    Wire wire(from_key ? with_key() : certified, from_key ? certified : with_key());
    wire.send(some_message());
    wire.carry();
    CHECK(wire.at_b.messages.empty() && wire.at_b_state == ReceiveState::kBroken);
  }
}

CASE(files_that_cannot_be_used) {
  Authority authority("one");
  const TlsSettings good = authority.issue("w0");
  const auto check = [&](std::string TlsSettings::* file, const std::string& path, const std::string& why) {
    TlsSettings bad = good;
    bad.*file = path;
    std::string what;
    try {
      make_tls(bad);
    } catch (const std::runtime_error& e) {
      what = e.what();
    }
    CHECK_SAYS(what, why);
  };
  check(&TlsSettings::certificate, "/no/such/file", "cannot read the certificate /no/such/file (option tls_cert)");
  check(&TlsSettings::private_key, authority.issue("w1").private_key, "option tls_key");
  check(&TlsSettings::authority, "/no/such/file", "authority /no/such/file (option tls_ca)");
}

}  // namespace
}  // namespace telegrad::test
