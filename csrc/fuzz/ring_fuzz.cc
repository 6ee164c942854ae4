// A ring whose other end writes any value into the shared control words at any time.
//
// Input: size of the ring, then steps of this end and of the hostile one.
#include <memory>
#include <string>

#include "fuzz/input.h"
#include "transports/shm/ring.h"

namespace telegrad::fuzz {
namespace {

void read(RingReader& reader, std::span<const std::byte> ring, std::size_t most) {
  const std::span<const std::byte> bytes = reader.peek();
  if (bytes.empty()) return;
  require(!reader.broken(), "a broken ring has no bytes");
  require(bytes.data() >= ring.data() && bytes.data() + bytes.size() <= ring.data() + ring.size(),
          "bytes are within the ring");
  const std::string copy(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  reader.take(std::min(copy.size(), most));
}

void write(RingWriter& writer, std::size_t capacity, std::size_t most) {
  const std::size_t room = writer.room();
  require(room <= capacity, "there is no more room than the ring has");
  require(!writer.broken() || room == 0, "a broken ring has no room");
  const std::string bytes(std::min(room, most), 'w');
  writer.put(bytes.data(), bytes.size());
  writer.publish();
}

void run(Input in) {
  const std::size_t capacity = std::size_t{1} << (in.byte() % 12);
  const auto data = std::make_unique<std::byte[]>(capacity);  // of exactly this size, for the address sanitizer
  RingControl control{};
  RingReader reader(&control, data.get(), capacity);
  RingWriter writer(&control, data.get(), capacity);
  while (!in.empty()) {
    const std::uint8_t step = in.byte();
    switch (step & 7) {
      case 0:
        read(reader, {data.get(), capacity}, in.number<std::uint16_t>());
        break;
      case 1:
        write(writer, capacity, in.number<std::uint16_t>());
        break;
      case 2:
        control.written += in.number<std::int16_t>();
        break;
      case 3:
        control.read += in.number<std::int16_t>();
        break;
      case 4:
        control.written = in.number<std::uint64_t>();
        break;
      case 5:
        control.read = in.number<std::uint64_t>();
        break;
      case 6:
        control.sleeps = in.byte();
        control.waits = in.byte();
        break;
      default:
        reader.sleep();
        reader.ready();
        reader.wake();
        reader.writer_waits();
        break;
    }
  }
}

}  // namespace
}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  telegrad::fuzz::run({data, size});
  return 0;
}
