// A connected, non-blocking socket as a stream link uses it: plain here, or encrypted (transports/tls/tls_stream.h).
//
// Reading and writing behave like readv and sendmsg: they return a number of bytes, 0 at the end of the stream, or -1
// with an errno; EPROTO means that `error` has the reason. One thread may read while another one writes.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <string>
#include <string_view>
#include <utility>

#include "base/unique_fd.h"
#include "core/link_error.h"

namespace telegrad {

class ByteStream {
 public:
  explicit ByteStream(UniqueFd socket) : socket_(std::move(socket)) {}
  virtual ~ByteStream() = default;
  ByteStream(const ByteStream&) = delete;
  ByteStream& operator=(const ByteStream&) = delete;

  int fd() const { return socket_.get(); }

  /// Writes some of the bytes. The stream has copied those that it accepts, but may keep them (`holds_output`).
  virtual ssize_t write(const iovec* parts, int count);
  /// Returns whether accepted bytes have not reached the socket. `flush` sends them; -1 with EAGAIN: not all.
  virtual bool holds_output() const { return false; }
  virtual int flush() { return 0; }
  /// Returns whether nothing can be written before something is read. Then `may_write_now` reports when it can.
  virtual bool waits_for_input() const { return false; }
  /// Returns, once, whether reading has made it possible, or necessary, to write.
  virtual bool may_write_now() { return false; }

  /// Reads. Fewer bytes than asked for: there are no more now. `from_socket` false: only what the stream holds already.
  virtual ssize_t read(const iovec* parts, int count, bool from_socket);
  /// Returns whether the stream has taken bytes from the socket that have not been read.
  virtual bool holds_input() const { return false; }

  virtual LinkError error() const { return {}; }
  /// Returns whether the other end may be the worker of this name.
  virtual bool is_certified_for(std::string_view) const { return true; }

 private:
  const UniqueFd socket_;
};

}  // namespace telegrad
