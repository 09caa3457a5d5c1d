#include "stitch/dist_optim/shard.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "stitch/base/byte_io.h"
#include "stitch/base/descriptor.h"
#include "stitch/dist_optim/shard_format.h"

namespace stitch::optim {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kMaxDimensions = 64;

// Reads fields of a shard and hashes them. Every length is checked against the bytes left in the
// file before memory is allocated for it.
class Reader {
 public:
  explicit Reader(const fs::path& path) : path_(path) {
    file_ = base::Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat state {};
    if (!file_ || ::fstat(file_.get(), &state) != 0)
      refuse_checkpoint(path_, "cannot be read: " + system_error_text(errno));
    if (!S_ISREG(state.st_mode)) refuse_checkpoint(path_, "is not a regular file");
    const auto size = static_cast<std::uint64_t>(state.st_size);
    if (size < kShardMagic.size() + kChecksumBytes) refuse_checkpoint(path_, "is cut short");
    left_ = size - kChecksumBytes;
  }

  template <base::WireScalar T>
  T read() {
    T value;
    read_bytes(&value, sizeof value);
    return base::to_wire_order(value);
  }
  std::string read_text() {
    std::string text(read_count(1), '\0');
    read_bytes(text.data(), text.size());
    return text;
  }
  std::uint32_t read_count(std::size_t bytes_each) {
    const auto count = read<std::uint32_t>();
    if (count > left_ / bytes_each) {
      refuse_checkpoint(path_, "is damaged: it announces " + std::to_string(count) + " items, " +
                                   std::to_string(left_) + " bytes are left");
    }
    return count;
  }
  void read_bytes(void* data, std::size_t size) {
    if (size > left_) refuse_checkpoint(path_, "is cut short");
    left_ -= size;
    get(data, size);
    hasher_.update(data, size);
  }
  std::vector<std::int64_t> read_sizes() {
    const auto dimensions = read_count(sizeof(std::int64_t));
    if (dimensions > kMaxDimensions)
      refuse_checkpoint(path_,
                        "is damaged: a tensor has " + std::to_string(dimensions) + " dimensions");
    std::vector<std::int64_t> sizes(dimensions);
    for (auto& size : sizes) {
      size = read<std::int64_t>();
      if (size < 0)
        refuse_checkpoint(path_, "is damaged: a tensor has size " + std::to_string(size));
    }
    return sizes;
  }
  NamedValues read_values() {
    NamedValues values;
    for (auto count = read_count(6); count > 0; --count) {
      std::string name = read_text();
      values.insert_or_assign(std::move(name), read_value());
    }
    return values;
  }
  // After the last field: verifies that no bytes are left over, and the checksum.
  void finish() {
    if (left_ != 0) refuse_checkpoint(path_, "has " + std::to_string(left_) + " bytes too many");
    const ShardChecksum computed = hasher_.finish();
    ShardChecksum saved{};
    get(saved.data(), saved.size());
    if (saved != computed) refuse_checkpoint(path_, "is damaged: its checksum is wrong");
  }

 private:
  NamedValue read_value() {
    switch (const auto type = read<std::uint8_t>()) {
      case 0:
        return read<std::uint8_t>() != 0;
      case 1:
        return read<std::int64_t>();
      case 2:
        return read<double>();
      case 3: {
        std::vector<double> numbers(read_count(sizeof(double)));
        for (auto& number : numbers) number = read<double>();
        return numbers;
      }
      case 4:
        return read_text();
      case 5:
        return read_tensor();
      default:
        refuse_checkpoint(path_, "is damaged: a value has type " + std::to_string(type));
    }
  }
  at::Tensor read_tensor() {
    const auto type = read<std::uint8_t>();
    if (type >= kElementTypes.size())
      refuse_checkpoint(path_, "is damaged: a tensor has element type " + std::to_string(type));
    const std::vector<std::int64_t> sizes = read_sizes();
    std::uint64_t bytes = c10::elementSize(kElementTypes[type]);
    const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    for (const std::int64_t size : sizes) {
      if (empty) break;
      if (static_cast<std::uint64_t>(size) > left_ / bytes)
        refuse_checkpoint(path_, "is cut short");
      bytes *= static_cast<std::uint64_t>(size);
    }
    at::Tensor tensor;
    try {
      tensor = at::empty(sizes, at::TensorOptions(kElementTypes[type]));
    } catch (const c10::Error& error) {
      refuse_checkpoint(path_, std::string("is damaged: ") + error.what_without_backtrace());
    }
    read_bytes(tensor.data_ptr(), empty ? 0 : bytes);
    return tensor;
  }
  void get(void* data, std::size_t size) {
    auto* at = static_cast<std::byte*>(data);
    while (size > 0) {
      if (block_at_ == block_end_) refill();
      const std::size_t taken = std::min(size, block_end_ - block_at_);
      std::copy_n(block_.data() + block_at_, taken, at);
      block_at_ += taken;
      at += taken;
      size -= taken;
    }
  }
  void refill() {
    block_.resize(kShardBlockBytes);
    while (true) {
      const ::ssize_t got = ::read(file_.get(), block_.data(), block_.size());
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) refuse_checkpoint(path_, "cannot be read: " + system_error_text(errno));
      if (got == 0) refuse_checkpoint(path_, "is cut short");
      block_at_ = 0;
      block_end_ = static_cast<std::size_t>(got);
      return;
    }
  }

  const fs::path path_;
  base::Descriptor file_;
  std::uint64_t left_ = 0;  // before the checksum
  ShardHasher hasher_;
  std::vector<std::byte> block_;
  std::size_t block_at_ = 0;
  std::size_t block_end_ = 0;
};

ShardHeader read_header(Reader& reader, const fs::path& file) {
  std::array<char, kShardMagic.size()> magic{};
  reader.read_bytes(magic.data(), magic.size());
  if (std::string_view(magic.data(), magic.size()) != kShardMagic)
    refuse_checkpoint(file, "is not an optimizer checkpoint");
  if (const auto version = reader.read<std::uint32_t>(); version != kShardVersion) {
    refuse_checkpoint(file, "has version " + std::to_string(version) +
                                ", this program reads version " + std::to_string(kShardVersion));
  }
  ShardHeader header;
  header.optimizer = reader.read_text();
  header.owner = reader.read_text();
  for (auto count = reader.read_count(sizeof(std::uint32_t)); count > 0; --count)
    header.owners.push_back(reader.read_text());
  header.save_id = reader.read_text();
  header.options = reader.read_values();
  return header;
}

SavedParameter read_name_and_sizes(Reader& reader) {
  SavedParameter parameter;
  parameter.name = reader.read_text();
  parameter.sizes = reader.read_sizes();
  return parameter;
}

}  // namespace

ShardHeader read_shard(const fs::path& file, const std::function<void(SavedParameter)>& each) {
  Reader reader(file);
  ShardHeader header = read_header(reader, file);
  for (auto count = reader.read_count(9); count > 0; --count) {
    SavedParameter parameter = read_name_and_sizes(reader);
    if (reader.read<std::uint8_t>() != 0) parameter.state = reader.read_values();
    each(std::move(parameter));
  }
  reader.finish();
  return header;
}

ShardHeader read_shard_header(const fs::path& file, SavedParameter& first) {
  Reader reader(file);
  ShardHeader header = read_header(reader, file);
  if (reader.read_count(9) > 0) first = read_name_and_sizes(reader);
  return header;
}

}  // namespace stitch::optim
