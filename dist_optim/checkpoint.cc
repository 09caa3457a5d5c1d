#include "stitch/dist_optim/checkpoint.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <map>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "stitch/base/byte_io.h"
#include "stitch/base/descriptor.h"
#include "stitch/base/error.h"

namespace stitch::optim {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kMagic{"stitchos"};
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kChecksumBytes = 32;
constexpr std::size_t kBlockBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxDimensions = 64;
constexpr std::string_view kSuffix = ".optimizer";
constexpr std::string_view kNewSuffix = ".optimizer.new";

using Checksum = std::array<unsigned char, kChecksumBytes>;

// Element types by their number in the format, which never changes; new ones are appended.
constexpr std::array kElementTypes{at::kDouble,        at::kFloat,        at::kHalf, at::kBFloat16,
                                   at::kComplexDouble, at::kComplexFloat, at::kLong, at::kInt,
                                   at::kShort,         at::kChar,         at::kByte, at::kBool};

[[noreturn]] void refuse(const fs::path& file, const std::string& why) {
  throw Error(ErrorCode::invalid_argument, "optimizer checkpoint " + file.string() + ' ' + why);
}

std::string reason(int error) { return std::generic_category().message(error); }

// BLAKE2b over all bytes. Detects damage, not forgery.
class Hasher {
 public:
  Hasher() { crypto_generichash_init(&state_, nullptr, 0, kChecksumBytes); }
  void update(const void* data, std::size_t size) {
    crypto_generichash_update(&state_, static_cast<const unsigned char*>(data), size);
  }
  Checksum finish() {
    Checksum sum{};
    crypto_generichash_final(&state_, sum.data(), sum.size());
    return sum;
  }

 private:
  crypto_generichash_state state_{};
};

}  // namespace

std::string new_save_id() {
  if (sodium_init() < 0)
    throw Error(ErrorCode::internal, "libsodium cannot be initialized: no random numbers");
  std::array<unsigned char, 16> id{};
  const auto now = static_cast<std::uint64_t>(
      std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count());
  for (std::size_t i = 0; i < 8; ++i) id[i] = static_cast<unsigned char>(now >> (56 - 8 * i));
  randombytes_buf(id.data() + 8, id.size() - 8);
  std::string text(id.size() * 2 + 1, '\0');
  sodium_bin2hex(text.data(), text.size(), id.data(), id.size());
  text.pop_back();
  return text;
}

// --- Writing -------------------------------------------------------------------------------------

class ShardWriter::File {
 public:
  File(fs::path path, std::size_t parameters) : path_(std::move(path)), left_(parameters) {
    file_ = base::Descriptor(
        ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666));
    if (!file_) refuse(path_, "cannot be written: " + reason(errno));
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
    if (block_.size() + size < kBlockBytes) {
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
    if (left_ == 0) refuse(path_, "has more parameters than announced");
    --left_;
  }

  void finish() {
    if (left_ != 0) refuse(path_, "misses " + std::to_string(left_) + " parameters");
    const Checksum sum = hasher_.finish();
    flush();
    put(reinterpret_cast<const std::byte*>(sum.data()), sum.size());
    if (::fsync(file_.get()) != 0) refuse(path_, "cannot be written to disk: " + reason(errno));
    if (::close(file_.release()) != 0) refuse(path_, "cannot be written: " + reason(errno));
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
      refuse(path_, std::string("cannot hold a tensor of type ") + tensor.toString());
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
    while (size > 0) {
      const ::ssize_t written = ::write(file_.get(), data, std::min<std::size_t>(size, 1U << 30));
      if (written < 0) {
        if (errno == EINTR) continue;
        refuse(path_, "cannot be written completely: " + reason(errno));
      }
      data += written;
      size -= static_cast<std::size_t>(written);
    }
  }

  const fs::path path_;
  std::size_t left_;
  base::Descriptor file_;
  std::vector<std::byte> block_;
  Hasher hasher_;
  bool finished_ = false;
};

ShardWriter::ShardWriter(const fs::path& folder, const ShardHeader& header,
                         std::size_t parameters) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) refuse(folder, "cannot be made: " + error.message());
  file_ = std::make_unique<File>(folder / (header.owner + std::string(kNewSuffix)), parameters);
  file_->write_bytes(kMagic.data(), kMagic.size());
  file_->write(kVersion);
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

// --- Reading -------------------------------------------------------------------------------------

namespace {

// Every length is compared with the rest of the file before memory is allocated for it.
class Reader {
 public:
  explicit Reader(const fs::path& path) : path_(path) {
    file_ = base::Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat state {};
    if (!file_ || ::fstat(file_.get(), &state) != 0)
      refuse(path_, "cannot be read: " + reason(errno));
    if (!S_ISREG(state.st_mode)) refuse(path_, "is not a regular file");
    const auto size = static_cast<std::uint64_t>(state.st_size);
    if (size < kMagic.size() + kChecksumBytes) refuse(path_, "is cut short");
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
      refuse(path_, "is damaged: it announces " + std::to_string(count) + " items, " +
                        std::to_string(left_) + " bytes are left");
    }
    return count;
  }
  void read_bytes(void* data, std::size_t size) {
    if (size > left_) refuse(path_, "is cut short");
    left_ -= size;
    get(data, size);
    hasher_.update(data, size);
  }
  std::vector<std::int64_t> read_sizes() {
    const auto dimensions = read_count(sizeof(std::int64_t));
    if (dimensions > kMaxDimensions)
      refuse(path_, "is damaged: a tensor has " + std::to_string(dimensions) + " dimensions");
    std::vector<std::int64_t> sizes(dimensions);
    for (auto& size : sizes) {
      size = read<std::int64_t>();
      if (size < 0) refuse(path_, "is damaged: a tensor has size " + std::to_string(size));
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
  // After everything: the checksum, and that nothing else follows.
  void finish() {
    if (left_ != 0) refuse(path_, "has " + std::to_string(left_) + " bytes too many");
    const Checksum computed = hasher_.finish();
    Checksum saved{};
    get(saved.data(), saved.size());
    if (saved != computed) refuse(path_, "is damaged: its checksum is wrong");
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
        refuse(path_, "is damaged: a value has type " + std::to_string(type));
    }
  }
  at::Tensor read_tensor() {
    const auto type = read<std::uint8_t>();
    if (type >= kElementTypes.size())
      refuse(path_, "is damaged: a tensor has element type " + std::to_string(type));
    const std::vector<std::int64_t> sizes = read_sizes();
    std::uint64_t bytes = c10::elementSize(kElementTypes[type]);
    const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    for (const std::int64_t size : sizes) {
      if (empty) break;
      if (static_cast<std::uint64_t>(size) > left_ / bytes) refuse(path_, "is cut short");
      bytes *= static_cast<std::uint64_t>(size);
    }
    at::Tensor tensor;
    try {
      tensor = at::empty(sizes, at::TensorOptions(kElementTypes[type]));
    } catch (const c10::Error& error) {
      refuse(path_, std::string("is damaged: ") + error.what_without_backtrace());
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
    block_.resize(kBlockBytes);
    while (true) {
      const ::ssize_t got = ::read(file_.get(), block_.data(), block_.size());
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) refuse(path_, "cannot be read: " + reason(errno));
      if (got == 0) refuse(path_, "is cut short");
      block_at_ = 0;
      block_end_ = static_cast<std::size_t>(got);
      return;
    }
  }

  const fs::path path_;
  base::Descriptor file_;
  std::uint64_t left_ = 0;  // before the checksum
  Hasher hasher_;
  std::vector<std::byte> block_;
  std::size_t block_at_ = 0;
  std::size_t block_end_ = 0;
};

ShardHeader read_header(Reader& reader, const fs::path& file) {
  std::array<char, kMagic.size()> magic{};
  reader.read_bytes(magic.data(), magic.size());
  if (std::string_view(magic.data(), magic.size()) != kMagic)
    refuse(file, "is not an optimizer checkpoint");
  if (const auto version = reader.read<std::uint32_t>(); version != kVersion) {
    refuse(file, "has version " + std::to_string(version) + ", this program reads version " +
                     std::to_string(kVersion));
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

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

}  // namespace

ShardHeader read_shard(const fs::path& file, const std::function<void(SavedParameter)>& each) {
  Reader reader(file);
  ShardHeader header = read_header(reader, file);
  for (auto count = reader.read_count(9); count > 0; --count) {
    SavedParameter parameter;
    parameter.name = reader.read_text();
    parameter.sizes = reader.read_sizes();
    if (reader.read<std::uint8_t>() != 0) parameter.state = reader.read_values();
    each(std::move(parameter));
  }
  reader.finish();
  return header;
}

namespace {

// The files of the folder whose names end so, in order.
std::vector<fs::path> files_of(const fs::path& folder, std::string_view suffix) {
  std::error_code error;
  std::vector<fs::path> found;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().ends_with(suffix) && is_file(it->path()))
      found.push_back(it->path());
  }
  if (error) refuse(folder, "cannot be read: " + error.message());
  std::sort(found.begin(), found.end());
  return found;
}

ShardHeader header_of(const fs::path& file) {
  Reader reader(file);
  return read_header(reader, file);
}

}  // namespace

void expect_folder_for(const fs::path& folder, const std::string& optimizer) {
  std::error_code ignored;
  if (!fs::exists(folder, ignored)) return;
  for (const auto& file : files_of(folder, kSuffix)) {
    if (const auto header = header_of(file); header.optimizer != optimizer) {
      refuse(file, "is of a " + header.optimizer + ", not a " + optimizer +
                       ": each optimizer needs a folder of its own");
    }
  }
}

void publish(const fs::path& folder, const std::vector<std::string>& owners) {
  std::set<fs::path> written;
  for (const auto& owner : owners) {
    const fs::path from = folder / (owner + std::string(kNewSuffix));
    const fs::path to = folder / (owner + std::string(kSuffix));
    std::error_code error;
    fs::rename(from, to, error);
    if (error) refuse(from, "cannot be put in place: " + error.message());
    written.insert(to);
  }
  for (const auto& file : files_of(folder, kSuffix)) {
    std::error_code ignored;
    if (!written.contains(file)) fs::remove(file, ignored);
  }
  const base::Descriptor directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory || ::fsync(directory.get()) != 0)
    refuse(folder, "cannot be written to disk: " + reason(errno));
}

std::vector<fs::path> find_shards(const fs::path& folder) {
  // By save, in order of time: the owners it should have, and the file of each.
  struct Save {
    std::set<std::string> owners;
    std::map<std::string, fs::path> files;
    [[nodiscard]] bool complete() const {
      return std::all_of(owners.begin(), owners.end(),
                         [&](const auto& owner) { return files.contains(owner); });
    }
  };
  std::map<std::string, Save> saves;
  const auto add = [&](const fs::path& file, const ShardHeader& header) {
    Save& save = saves[header.save_id];
    save.owners.insert(header.owners.begin(), header.owners.end());
    save.files.emplace(header.owner, file);
  };
  const auto complete = [&]() -> std::optional<std::vector<fs::path>> {
    for (auto save = saves.rbegin(); save != saves.rend(); ++save) {  // the latest first
      if (!save->second.complete()) continue;
      std::vector<fs::path> files;
      for (const auto& [owner, file] : save->second.files) files.push_back(file);
      return files;
    }
    return std::nullopt;
  };
  for (const auto& file : files_of(folder, kSuffix))
    add(file, read_shard(file, [](const SavedParameter&) {}));
  if (auto files = complete()) return *files;
  // A save that ended between two renames: its other files are finished, under their first names.
  for (const auto& file : files_of(folder, kNewSuffix)) {
    try {
      add(file, read_shard(file, [](const SavedParameter&) {}));
    } catch (const Error&) {  // not finished: no part of a complete save
    }
  }
  if (auto files = complete()) return *files;
  if (saves.empty()) refuse(folder, "is not there: no file ends in " + std::string(kSuffix));
  std::string missing;
  for (const auto& [id, save] : saves) {
    for (const auto& owner : save.owners) {
      if (!save.files.contains(owner)) missing += (missing.empty() ? "" : ", ") + owner;
    }
  }
  refuse(folder,
         "is not complete: the files of these owners are missing or of another save: " + missing);
}

// --- What fits -----------------------------------------------------------------------------------

void check_optimizer(const fs::path& file, const ShardHeader& header,
                     const std::string& optimizer) {
  if (header.optimizer != optimizer)
    refuse(file, "is of a " + header.optimizer + ", not a " + optimizer);
}

void check_saved(const fs::path& file, const SavedParameter& saved,
                 const std::vector<std::int64_t>* sizes) {
  if (sizes == nullptr)
    refuse(file, "has parameter \"" + saved.name + "\", which this optimizer does not have");
  if (saved.sizes == *sizes) return;
  std::ostringstream text;
  text << "has shape " << at::IntArrayRef(saved.sizes) << " for parameter \"" << saved.name
       << "\", it is " << at::IntArrayRef(*sizes);
  refuse(file, text.str());
}

Error missing_parameter(const fs::path& folder, const std::string& parameter) {
  return Error(ErrorCode::invalid_argument, "optimizer checkpoint " + folder.string() +
                                                " has no parameter \"" + parameter + '"');
}

}  // namespace stitch::optim
