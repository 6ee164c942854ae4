#include <openssl/err.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "transports/tls/tls_stream.h"

namespace telegrad {
namespace {

constexpr std::size_t kTurn = 128 << 10;   // bytes encrypted or decrypted while the mutex is held
constexpr std::size_t kRecord = 16 << 10;  // content of a record at most
// The only alert that an initiator gets before it has proven itself: handshake_failure, fatal.
constexpr std::string_view kRefusal("\x15\x03\x03\x00\x02\x02\x28", 7);

// Like every reset, it does not mean that the peer is not there.
constexpr const char* kClosed =
    "the peer has closed the connection in the TLS handshake: it does not encrypt (option encryption), has many other "
    "connections, or has ended";
constexpr std::string_view kNoTls = "the other end does not use TLS 1.3: give all workers the same option encryption";

std::string name_of_subject(X509* certificate) {
  unsigned char* text = nullptr;
  const int at = X509_NAME_get_index_by_NID(X509_get_subject_name(certificate), NID_commonName, -1);
  if (at < 0) return {};
  X509_NAME_ENTRY* const entry = X509_NAME_get_entry(X509_get_subject_name(certificate), at);
  const int size = ASN1_STRING_to_UTF8(&text, X509_NAME_ENTRY_get_data(entry));
  const std::string name(reinterpret_cast<const char*>(text), size > 0 ? static_cast<std::size_t>(size) : 0);
  OPENSSL_free(text);
  return name;
}

bool has_dns_name(X509* certificate, std::string_view name) {
  bool found = false;
  auto* const names =
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr));
  for (int i = 0; names && i < sk_GENERAL_NAME_num(names); ++i) {
    const GENERAL_NAME* const one = sk_GENERAL_NAME_value(names, i);
    if (one->type != GEN_DNS) continue;
    const auto* const text = reinterpret_cast<const char*>(ASN1_STRING_get0_data(one->d.dNSName));
    found = found || name == std::string_view(text, static_cast<std::size_t>(ASN1_STRING_length(one->d.dNSName)));
  }
  GENERAL_NAMES_free(names);
  return found;
}

}  // namespace

/// Connects OpenSSL with the socket and the output buffer of a stream.
class TlsStream::Bio {
 public:
  static BIO* make(TlsStream* stream) {
    static BIO_METHOD* const kMethod = [] {
      BIO_METHOD* const m = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "telegrad stream");
      BIO_meth_set_read(m, read);
      BIO_meth_set_write(m, write);
      BIO_meth_set_ctrl(m, control);
      return m;
    }();
    BIO* const bio = BIO_new(kMethod);
    BIO_set_data(bio, stream);
    BIO_set_init(bio, 1);
    return bio;
  }

 private:
  static int read(BIO* bio, char* to, int size) {
    auto& s = *static_cast<TlsStream*>(BIO_get_data(bio));
    BIO_clear_retry_flags(bio);
    if (!s.from_socket_ || s.drained_) {
      BIO_set_retry_read(bio);
      return -1;
    }
    ssize_t n;
    do {
      n = ::recv(s.fd(), to, static_cast<std::size_t>(size), MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      s.drained_ = true;
      BIO_set_retry_read(bio);
    } else if (n < 0) {
      s.socket_error_ = errno;
    } else if (n == 0) {
      s.ended_ = true;
    } else if (n < size) {
      s.drained_ = true;
    }
    return static_cast<int>(n);
  }

  static int write(BIO* bio, const char* from, int size) {
    auto& s = *static_cast<TlsStream*>(BIO_get_data(bio));
    try {
      s.output_.append(from, static_cast<std::size_t>(size));
    } catch (const std::bad_alloc&) {  // no exception may pass through OpenSSL
      s.socket_error_ = ENOMEM;
      return -1;
    }
    return size;
  }

  static long control(BIO* bio, int command, long, void*) {
    if (command == BIO_CTRL_EOF) return static_cast<TlsStream*>(BIO_get_data(bio))->ended_;
    return command == BIO_CTRL_FLUSH;
  }
};

TlsStream::TlsStream(UniqueFd socket, std::shared_ptr<const TlsContext> context, bool initiator)
    : ByteStream(std::move(socket)),
      context_(std::move(context)),
      data_{.context = context_.get(), .initiator = initiator},
      ssl_(TlsContext::make_connection(data_)) {
  BIO* const bio = Bio::make(this);
  SSL_set_bio(ssl_.get(), bio, bio);
}

TlsStream::~TlsStream() = default;

LinkError TlsStream::error() const {
  Lock lock(mutex_);
  return error_;
}

/// Sets errno, and returns -1.
int TlsStream::fail(const LinkError& why) {
  if (error_.text.empty()) error_ = why;
  waits_for_input_ = false;
  errno = EPROTO;
  return -1;
}

// ---- the handshake

/// Continues the handshake. Returns false with errno, or with errno 0 if the stream has ended.
bool TlsStream::shake_hands() {
  if (!error_.text.empty()) return fail(error_) == 0;
  begun_ = true;
  const std::size_t before = output_.size();
  ERR_clear_error();
  const int result = SSL_do_handshake(ssl_.get());
  if (result == 1) {
    if (!check_peer()) return fail("the other end did not use the group's key") == 0;
    established_ = true;
    waits_for_input_ = false;
    may_write_now_ = true;  // for a write that has waited
    flush_locked();         // `write` or `flush` report an error
    return true;
  }
  if (SSL_get_error(ssl_.get(), result) == SSL_ERROR_WANT_READ) {
    answered_ = answered_ || output_.size() > before;
    if (flush_locked() != 0 && errno != EAGAIN && errno != EWOULDBLOCK) return false;
    waits_for_input_ = !holds_output_;
    may_write_now_ = holds_output_.load();
    errno = EAGAIN;
    return false;
  }
  const std::string reasons = openssl_errors();
  if (ended_ || socket_error_ == ECONNRESET) {
    if (data_.initiator) return fail(LinkError::of_call(ECONNRESET).with_context(kClosed)) == 0;
    errno = socket_error_;
    return false;
  }
  if (socket_error_ != 0) {
    errno = socket_error_;
    return false;
  }
  if (!data_.initiator && !answered_) {
    output_.resize(before);
    output_ += kRefusal;
  }
  flush_locked();
  return fail(refusal(reasons)) == 0;
}

/// Translates OpenSSL's reasons for a failed handshake, and for alerts.
LinkError TlsStream::refusal(const std::string& reasons) const {
  const auto has = [&](std::string_view part) { return reasons.find(part) != std::string::npos; };
  if (has("alert") && has("record mac")) return "the other end has received bytes that are not authentic";
  if (has("alert")) {
    return {
        "refused by the peer, which logs the reason: this worker has another secret, certificate authority or group "
        "than the peer (TLS: " +
            reasons + ")",
        kRefusalCode};
  }
  if (has("wrong version number") || has("http request") || has("packet length too long") ||
      has("unexpected message") || has("unsupported protocol") || has("bad record type")) {
    return std::string(kNoTls) + " (TLS: " + reasons + ")";
  }
  if (data_.verify_error != X509_V_OK) {
    return "the certificate of the other end is not accepted: " +
           std::string(X509_verify_cert_error_string(data_.verify_error));
  }
  if (established_) return "received bytes that are not authentic (TLS: " + reasons + ")";
  return {"the group's secret does not match, or the other end has no certificate (TLS: " + reasons + ")",
          kRefusalCode};
}

/// Returns whether the other end has proven itself by the configured means.
bool TlsStream::check_peer() {
  if (!context_->has_certificates()) return SSL_session_reused(ssl_.get()) == 1;
  return SSL_get0_peer_certificate(ssl_.get()) != nullptr && SSL_get_verify_result(ssl_.get()) == X509_V_OK;
}

bool TlsStream::is_certified_for(std::string_view name) const {
  if (!context_->has_certificates()) return true;
  Lock lock(mutex_);
  X509* const certificate = SSL_get0_peer_certificate(ssl_.get());
  return certificate && (name_of_subject(certificate) == name || has_dns_name(certificate, name));
}

// ---- writing

/// Sends the output. Returns 0, or -1 with errno.
int TlsStream::flush_locked() {
  while (sent_ < output_.size()) {
    const ssize_t n = ::send(fd(), output_.data() + sent_, output_.size() - sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      holds_output_.store(true, std::memory_order_release);
      return -1;
    }
    sent_ += static_cast<std::size_t>(n);
  }
  output_.clear();
  sent_ = 0;
  holds_output_.store(false, std::memory_order_release);
  return 0;
}

int TlsStream::flush() {
  Lock lock(mutex_);
  from_socket_ = false;
  if (!begun_ && data_.initiator && !shake_hands() && errno != EAGAIN) return -1;
  return flush_locked();
}

/// Sets errno, and returns false. OpenSSL encrypts nothing more once a read has seen the end of the socket: the
/// connection has broken, and no byte was wrong.
bool TlsStream::fail_to_write() {
  const std::string reasons = openssl_errors();
  if (!ended_ && socket_error_ == 0) return fail(refusal(reasons)) == 0;
  errno = socket_error_ != 0 ? socket_error_ : EPIPE;
  return false;
}

bool TlsStream::encrypt(const void* data, std::size_t size) {
  std::size_t done = 0;
  ERR_clear_error();
  for (const auto* at = static_cast<const std::byte*>(data); size > 0; at += done, size -= done) {
    if (SSL_write_ex(ssl_.get(), at, size, &done) != 1) return fail_to_write();
    encrypted_ += done;
  }
  return true;
}

ssize_t TlsStream::write(const iovec* parts, int count) {
  Lock lock(mutex_);
  from_socket_ = false;
  if (!error_.text.empty()) return fail(error_);
  if (!established_ && !shake_hands()) return -1;
  if (flush_locked() != 0) return -1;
  if (encrypted_ >= context_->key_update()) {
    encrypted_ = 0;
    if (SSL_key_update(ssl_.get(), SSL_KEY_UPDATE_NOT_REQUESTED) != 1) return fail_to_write() ? 0 : -1;
  }
  std::byte record[kRecord];  // small parts share a record
  std::size_t gathered = 0, accepted = 0;
  for (int i = 0; i < count && accepted < kTurn; ++i) {
    const auto* data = static_cast<const std::byte*>(parts[i].iov_base);
    std::size_t left = std::min(parts[i].iov_len, kTurn - accepted);
    accepted += left;
    while (left > 0) {
      if (gathered == 0 && left >= kRecord) {
        const std::size_t whole = left / kRecord * kRecord;
        if (!encrypt(data, whole)) return -1;
        data += whole;
        left -= whole;
        continue;
      }
      const std::size_t n = std::min(left, kRecord - gathered);
      std::memcpy(record + gathered, data, n);
      gathered += n;
      data += n;
      left -= n;
      if (gathered < kRecord) continue;
      if (!encrypt(record, gathered)) return -1;
      gathered = 0;
    }
  }
  if (gathered > 0 && !encrypt(record, gathered)) return -1;
  if (flush_locked() != 0 && errno != EAGAIN && errno != EWOULDBLOCK) return -1;
  return static_cast<ssize_t>(accepted);
}

// ---- reading

/// Reads from the socket of an initiator that has not written yet: it may be connecting, or the peer may close it.
ssize_t TlsStream::peek() {
  char byte;
  const ssize_t n = ::recv(fd(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
  return n > 0 ? fail(std::string(kNoTls)) : n;
}

/// Decrypts up to `size` bytes. Returns 0 at the end of the stream, or -1 with errno.
ssize_t TlsStream::read_some(std::byte* to, std::size_t size) {
  if (!error_.text.empty()) return fail(error_);
  if (!established_ && !shake_hands()) return errno == 0 ? 0 : -1;
  std::size_t done = 0;
  ERR_clear_error();
  const int result = SSL_read_ex(ssl_.get(), to, size, &done);
  if (result == 1) return static_cast<ssize_t>(done);
  switch (SSL_get_error(ssl_.get(), 0)) {
    case SSL_ERROR_WANT_READ:
      errno = EAGAIN;
      return -1;
    case SSL_ERROR_ZERO_RETURN:
      return 0;
    default:
      break;
  }
  const std::string reasons = openssl_errors();
  if (ended_) return 0;  // the frames show whether something is missing
  if (socket_error_ != 0) {
    errno = socket_error_;
    return -1;
  }
  flush_locked();  // the alert
  return fail(refusal(reasons));
}

ssize_t TlsStream::read(const iovec* parts, int count, bool from_socket) {
  std::size_t got = 0;
  bool drained = false;
  for (int i = 0; i < count; ++i) {
    auto* const to = static_cast<std::byte*>(parts[i].iov_base);
    for (std::size_t filled = 0; filled < parts[i].iov_len;) {
      Lock lock(mutex_);
      if (!begun_ && data_.initiator) return peek();
      from_socket_ = from_socket;
      if (!std::exchange(drained, true)) drained_ = false;
      for (std::size_t turn = 0; turn < kTurn && filled < parts[i].iov_len;) {
        const ssize_t n = read_some(to + filled, parts[i].iov_len - filled);
        if (n <= 0) {
          holds_input_ =
              got > 0 && !error_.text.empty();  // the next read reports the error, which the socket does not signal
          return got > 0 ? static_cast<ssize_t>(got) : n;
        }
        filled += static_cast<std::size_t>(n);
        turn += static_cast<std::size_t>(n);
        got += static_cast<std::size_t>(n);
      }
    }
  }
  holds_input_ = true;
  return static_cast<ssize_t>(got);
}

// ----

LinkSecurityPtr make_tls(const TlsSettings& settings) { return std::make_shared<TlsContext>(settings); }

std::unique_ptr<ByteStream> make_tls_stream(UniqueFd socket, const LinkSecurityPtr& security, bool initiator) {
  return std::make_unique<TlsStream>(std::move(socket), std::dynamic_pointer_cast<const TlsContext>(security),
                                     initiator);
}

}  // namespace telegrad
