// Writes seeds of the fuzzers: what real ends send to each other. Usage: fuzz_seeds FOLDER.
//
// The corpus in csrc/fuzz/corpus has grown from them: tools/fuzz.sh merges what fuzzing finds. The seeds of values and
// metadata are made by tools/fuzz_seeds.py.
#include <sys/socket.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "core/handshake.h"
#include "core/left_out.h"
#include "fuzz/inbox.h"
#include "transports/frames.h"
#include "transports/shm/layout.h"
#include "transports/tls/security.h"

namespace telegrad::fuzz {
namespace {

std::filesystem::path folder;

void write(const std::string& target, const std::string& name, const std::string& bytes) {
  std::filesystem::create_directories(folder / target);
  std::ofstream(folder / target / name, std::ios::binary) << bytes;
}

template <class Number>
std::string number(Number value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string frame(const FrameHeader& header, std::string_view name, std::string_view body,
                  const std::vector<std::string>& segments) {
  Outgoing m;
  m.header = header;
  m.name = name;
  m.body = body;
  for (const std::string& s : segments) m.segments.push_back({reinterpret_cast<const std::byte*>(s.data()), s.size()});
  FrameHeader complete = m.header;
  fill_header(complete, m);
  std::string bytes(frame_size(m), '\0');
  flatten(m, complete, reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

/// Frames of a session, for the parser: flags, size of the pieces, size without memory, stream.
void frames() {
  const std::string call = frame({.type = FrameType::kRequest, .tag = 1, .name_id = 1, .call_id = 5, .timeout = 1000},
                                 "f", "\x82\x01\x02", {});
  const std::string tensors = frame({.type = FrameType::kReply, .flags = kTrailer, .call_id = 5, .credit = 60}, "",
                                    "body", {std::string(100, 's'), "", "trailer"});
  const std::string control = frame({.type = FrameType::kCredit, .call_id = 9, .credit = 1}, "", "", {}) +
                              frame({.type = FrameType::kPing}, "", "", {}) +
                              frame({.type = FrameType::kCancel, .tag = 2, .call_id = 5}, "", "", {});
  const std::string hello = frame({.type = FrameType::kHello}, "", std::string(120, 'h'), {});
  const std::string large = frame({.type = FrameType::kRequest, .call_id = 6}, "", std::string(700, 'l'), {});
  const auto start = [](int flags, int piece, int refuse) {
    return number<std::uint8_t>(flags) + number<std::uint16_t>(piece) + number<std::uint16_t>(refuse);
  };
  write("frames", "call", start(0, 0, 4000) + call + tensors + control);
  write("frames", "pieces", start(4, 7, 4000) + tensors + call);
  write("frames", "narrow", start(2, 50, 4000) + call + tensors);
  write("frames", "hello", start(1, 0, 4000) + hello + call);
  write("frames", "no_memory", start(0, 100, 20) + large + call);
}

/// An attacker that passes every frame on: choice = receiver | kPass << 1.
void handshakes() {
  const std::string all = "\x01\x00\x01\x00\x01\x00\x01";
  const std::string passed(all.data(), 7);
  for (int settings = 0; settings < 4; ++settings)
    write("handshake", "passed" + number('0' + settings).substr(0, 1), number<std::uint8_t>(settings) + passed);
  HandshakeConfig alice{.me = {.id = 1, .name = "alice", .incarnation = 11}, .group = "group", .secret = "secret"};
  auto h = Handshake::initiate(alice, {.id = 2, .name = "bob"}, {.number = 7});
  const std::string hello = h.begin().body;
  const std::string forged = number<std::uint8_t>(1 | 3 << 1 | 1 << 4) + number<std::uint16_t>(hello.size()) + hello;
  write("handshake", "forged", number<std::uint8_t>(0) + forged + passed);
}

void left_out() {
  const auto shape = [](std::uint16_t flags, int why, const std::string& rest) {
    return number(flags) + number<std::uint8_t>(why) + rest;
  };
  write("left_out", "trailer", shape(kTrailer, 0, std::string("\x02\x20\x07\x01") + "fbody"));
  write("left_out", "expired", shape(kLeftOut | kMustDeliver, 3, std::string("\x00\x00", 2) + "E"));
  write("left_out", "canceled", shape(kMustRun, 2, std::string("\x01\x80\x03") + "abc" + "body of a request"));
}

/// Messages and fragments: see reassembler_fuzz.cc.
void reassembler() {
  const auto message = [](int lane, int shape, int body, std::initializer_list<int> sizes) {
    std::string s =
        number<std::uint8_t>(lane) + number<std::uint8_t>(shape | sizes.size()) + number<std::uint8_t>(body);
    for (const int size : sizes) s += number<std::uint16_t>(size);
    return s;
  };
  const auto fragment = [](int lane, int number_of, int place, int size) {
    return number<std::uint8_t>(lane | 1 << 2) + number<std::uint8_t>(number_of) + number<std::int16_t>(place) +
           number<std::uint16_t>(size);
  };
  const std::string memory = number<std::uint16_t>(60000);
  write("reassembler", "in_order",
        memory + message(0, 0, 10, {100, 200}) + fragment(1, 0, 0, 100) + fragment(2, 0, 100, 200));
  write("reassembler", "early",
        memory + fragment(1, 0, 50, 50) + message(0, 0x40, 10, {100, 0x8010}) + fragment(2, 0, 0, 50));
  write("reassembler", "two",
        memory + message(0, 0, 3, {10}) + message(0, 0, 3, {20}) + fragment(1, 1, 0, 20) + fragment(0, 0, 0, 10));
  write("reassembler", "whole", memory + message(0, 0x80, 3, {0x8020}) + message(0, 0, 0, {}));
  write("reassembler", "no_memory", number<std::uint16_t>(90) + fragment(1, 0, 0, 100) + message(0, 0, 10, {100}));
}

void rings() {
  const auto ring = [](int bits, const std::string& steps) { return number<std::uint8_t>(bits) + steps; };
  const std::string writes = number<std::uint8_t>(1) + number<std::uint16_t>(100),
                    reads = number<std::uint8_t>(0) + number<std::uint16_t>(60);
  write("ring", "around", ring(7, writes + reads + writes + reads + writes + "\x07"));
  write("ring", "forged", ring(8, writes + "\x04" + number<std::uint64_t>(1000) + reads));
  write("ring", "read_too_far", ring(8, writes + "\x05" + number<std::uint64_t>(1000) + writes));
}

void shm_links() {
  const auto byte = [](int value) { return number<std::uint8_t>(value); };
  const std::string offer = byte(1) + byte(1), receive = byte(8);
  const std::string leased = byte(5) + byte(1) + byte(1) + number<std::uint16_t>(1) + number<std::uint16_t>(500);
  const std::string send = byte(9) + byte(0) + number<std::uint16_t>(20000),
                    mapped = byte(0) + byte(ShmPacket::kMapped) + byte(1) + number<std::uint32_t>(0);
  write("shm_link", "leased", offer + receive + leased + receive + byte(10));
  write("shm_link", "returned", offer + receive + leased + receive + byte(9) + byte(2) + number<std::uint16_t>(10));
  write("shm_link", "arena", send + mapped + receive + send + byte(7) + byte(1) + byte(0) + send);
  write("shm_link", "multicast",
        byte(1) + byte(0x81) + receive + byte(5) + byte(1) + byte(0x81) + number<std::uint16_t>(0) +
            number<std::uint16_t>(9000) + receive);
  write("shm_link", "control", byte(3) + number<std::uint16_t>(8) + number<std::uint64_t>(~0ull) + receive + send);
}

/// The first bytes of a real initiator.
void hellos() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0) return;
  const UniqueFd other(ends[0]);
  const auto stream = make_tls_stream(UniqueFd(ends[1]), make_tls({.key = std::string(32, 'x')}), true);
  iovec part{const_cast<char*>("hello"), 5};
  static_cast<void>(stream->write(&part, 1));
  stream->flush();
  char bytes[4096];
  const ssize_t size = ::recv(other.get(), bytes, sizeof bytes, MSG_DONTWAIT);
  const std::string hello(bytes, size > 0 ? static_cast<std::size_t>(size) : 0);
  write("tls_hello", "hello", number<std::uint8_t>(0) + number<std::uint16_t>(0) + hello);
  write("tls_hello", "pieces", number<std::uint8_t>(4) + number<std::uint16_t>(50) + hello + std::string(20, '\x16'));
  write("tls_hello", "alert", std::string("\x01\x00\x00\x15\x03\x03\x00\x02\x02\x28", 10));
  write("tls_hello", "plain", std::string("\x00\x00\x00", 3) + frame({.type = FrameType::kHello}, "", "plain", {}));
}

}  // namespace
}  // namespace telegrad::fuzz

int main(int count, char** arguments) {
  using namespace telegrad::fuzz;
  if (count != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", arguments[0]);
    return 2;
  }
  folder = arguments[1];
  frames();
  handshakes();
  left_out();
  reassembler();
  rings();
  shm_links();
  hellos();
  return 0;
}
