#include "stitch/dist_optim/shard.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <variant>
#include <vector>

#include "stitch/base/byte_io.h"
#include "stitch/base/descriptor.h"
#include "stitch/base/own_folder.h"
#include "stitch/base/signals.h"
#include "stitch/dist_optim/shard_format.h"

namespace stitch::optim {

namespace fs = std::filesystem;

class ShardWriter::File {
 public:
  File(fs::path path, std::size_t parameters) : path_(std::move(path)), left_(parameters) {
    const base::Descriptor folder(
        ::open(path_.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    file_ = base::make_file(folder.get(), path_.filename());
    if (!file_) refuse_checkpoint(path_, "cannot be written: " + system_error_text(errno));
  }
  ~File() {
    if (finished_) return;
    std::error_code ignored;
    fs::remove(path_, ignored);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  template <base::WireScalar T>
  void write(T value) {
    value = base::to_wire_order(value);
    write_bytes(&value, sizeof value);
  }
  void write_text(std::string_view text) {
    write(static_cast<std::uint32_t>(text.size()));
    write_bytes(text.data(), text.size());
  }
  void write_bytes(const void* data, std::size_t size) {
    hasher_.update(data, size);
    const auto* bytes = static_cast<const std::byte*>(data);
    if (block_.size() + size < kShardBlockBytes) {
      block_.insert(block_.end(), bytes, bytes + size);
      return;
    }
    flush();
    put(bytes, size);
  }
  void write_values(const NamedValues& values) {
    write(static_cast<std::uint32_t>(values.size()));
    for (const auto& [name, value] : values) {
      write_text(name);
      write(static_cast<std::uint8_t>(value.index()));
      std::visit([this](const auto& each) { write_value(each); }, value);
    }
  }
  void write_sizes(at::IntArrayRef sizes) {
    write(static_cast<std::uint32_t>(sizes.size()));
    for (const std::int64_t size : sizes) write(size);
  }
  void parameter_begins() {
    if (left_ == 0) refuse_checkpoint(path_, "has more parameters than announced");
    --left_;
  }

  void finish() {
    if (left_ != 0) refuse_checkpoint(path_, "misses " + std::to_string(left_) + " parameters");
    const ShardChecksum sum = hasher_.finish();
    flush();
    put(reinterpret_cast<const std::byte*>(sum.data()), sum.size());
    if (::fsync(file_.get()) != 0)
      refuse_checkpoint(path_, "cannot be written to disk: " + system_error_text(errno));
    if (::close(file_.release()) != 0)
      refuse_checkpoint(path_, "cannot be written: " + system_error_text(errno));
    finished_ = true;
  }

 private:
  void write_value(bool value) { write(static_cast<std::uint8_t>(value ? 1 : 0)); }
  void write_value(std::int64_t value) { write(value); }
  void write_value(double value) { write(value); }
  void write_value(const std::vector<double>& values) {
    write(static_cast<std::uint32_t>(values.size()));
    for (const double value : values) write(value);
  }
  void write_value(const std::string& text) { write_text(text); }
  void write_value(const at::Tensor& tensor) {
    const auto type = std::find(kElementTypes.begin(), kElementTypes.end(), tensor.scalar_type());
    if (type == kElementTypes.end() || tensor.layout() != at::kStrided) {
      refuse_checkpoint(path_, std::string("cannot hold a tensor of type ") + tensor.toString());
    }
    const at::Tensor plain = tensor.detach().cpu().contiguous();
    write(static_cast<std::uint8_t>(type - kElementTypes.begin()));
    write_sizes(plain.sizes());
    write_bytes(plain.data_ptr(), plain.nbytes());
  }

  void flush() {
    put(block_.data(), block_.size());
    block_.clear();
  }
  void put(const std::byte* data, std::size_t size) {
    const base::FileSizeSignalBlocked blocked;
    while (size > 0) {
      const ::ssize_t written = ::write(file_.get(), data, std::min<std::size_t>(size, 1U << 30));
      if (written < 0) {
        if (errno == EINTR) continue;
        refuse_checkpoint(path_, "cannot be written completely: " + system_error_text(errno));
      }
      data += written;
      size -= static_cast<std::size_t>(written);
    }
  }

  const fs::path path_;
  std::size_t left_;
  base::Descriptor file_;
  std::vector<std::byte> block_;
  ShardHasher hasher_;
  bool finished_ = false;
};

ShardWriter::ShardWriter(const fs::path& folder, const ShardHeader& header,
                         std::size_t parameters) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) refuse_checkpoint(folder, "cannot be made: " + error.message());
  file_ =
      std::make_unique<File>(folder / (header.owner + std::string(kUnpublishedSuffix)), parameters);
  file_->write_bytes(kShardMagic.data(), kShardMagic.size());
  file_->write(kShardVersion);
  file_->write_text(header.optimizer);
  file_->write_text(header.owner);
  file_->write(static_cast<std::uint32_t>(header.owners.size()));
  for (const auto& owner : header.owners) file_->write_text(owner);
  file_->write_text(header.save_id);
  file_->write_values(header.options);
  file_->write(static_cast<std::uint32_t>(parameters));
}

ShardWriter::~ShardWriter() = default;

void ShardWriter::add(const SavedParameter& parameter) {
  file_->parameter_begins();
  file_->write_text(parameter.name);
  file_->write_sizes(parameter.sizes);
  file_->write(static_cast<std::uint8_t>(parameter.state ? 1 : 0));
  if (parameter.state) file_->write_values(*parameter.state);
}

void ShardWriter::finish() { file_->finish(); }

}  // namespace stitch::optim
