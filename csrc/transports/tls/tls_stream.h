// A TLS connection as a byte stream.
//
// OpenSSL reads and writes through a BIO of this class: it reads from the socket in large pieces, and writes to a
// buffer that is sent with one system call for many records. So OpenSSL accepts every write, and what the socket does
// not take stays in the buffer (`holds_output`). Only `read` reads from the socket, because the thread that reads is
// the one that is notified. Receiving ends only once nothing is left in OpenSSL's buffers, because the socket does not
// signal that.
//
// A mutex protects the state of the connection, which OpenSSL uses for both directions. It is held for kTurn bytes at
// most.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "transports/tls/tls_context.h"

namespace telegrad {

class TlsStream final : public ByteStream {
 public:
  TlsStream(UniqueFd socket, std::shared_ptr<const TlsContext> context, bool initiator);
  ~TlsStream() override;

  ssize_t write(const iovec* parts, int count) override;
  bool holds_output() const override { return holds_output_.load(std::memory_order_acquire); }
  int flush() override;
  bool waits_for_input() const override { return waits_for_input_.load(std::memory_order_acquire); }
  bool may_write_now() override { return may_write_now_.exchange(false); }
  ssize_t read(const iovec* parts, int count, bool from_socket) override;
  bool holds_input() const override { return holds_input_; }
  LinkError error() const override;
  bool is_certified_for(std::string_view name) const override;

 private:
  using Lock = std::lock_guard<std::mutex>;
  class Bio;

  bool shake_hands();
  bool check_peer();
  bool encrypt(const void* data, std::size_t size);
  bool fail_to_write();
  int flush_locked();
  ssize_t read_some(std::byte* to, std::size_t size);
  ssize_t peek();
  int fail(const LinkError& why);
  LinkError refusal(const std::string& reasons) const;

  const std::shared_ptr<const TlsContext> context_;
  TlsCallbackData data_;
  mutable std::mutex mutex_;
  std::unique_ptr<SSL, SslDeleter> ssl_;
  bool begun_ = false;           // the first bytes of the handshake are written or read
  bool answered_ = false;        // the acceptor has sent its part of the handshake
  bool established_ = false;     // the other end is authenticated
  std::string output_;           // encrypted bytes
  std::size_t sent_ = 0;         // of them
  std::uint64_t encrypted_ = 0;  // bytes with the present key
  LinkError error_;              // why the connection has failed

  // What the BIO may do and has seen, during one call of OpenSSL.
  bool from_socket_ = false;  // it may read from the socket
  bool drained_ = false;      // the socket had fewer bytes than asked for
  bool ended_ = false;        // the stream has ended
  int socket_error_ = 0;      // an errno

  bool holds_input_ = false;  // reading thread only
  std::atomic<bool> holds_output_ = false;
  std::atomic<bool> waits_for_input_ = false;
  std::atomic<bool> may_write_now_ = false;
};

}  // namespace telegrad
