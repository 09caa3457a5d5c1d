#include "support/fashion_mnist.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr std::uint32_t kImagesMagic = 0x00000803;
constexpr std::uint32_t kLabelsMagic = 0x00000801;
constexpr std::uint32_t kSide = 28;
constexpr std::uint32_t kClasses = 10;
constexpr std::uint32_t kMaxCount = 1'000'000;

// One gzipped file in the idx format: big-endian numbers in front, then bytes.
class IdxFile {
 public:
  explicit IdxFile(std::filesystem::path path) : path_(std::move(path)) {
    if (std::filesystem::is_directory(path_)) fail("is a folder, not a file");
    errno = 0;
    file_.reset(::gzopen(path_.c_str(), "rb"));
    if (file_ == nullptr) {
      const std::string reason = errno != 0 ? std::strerror(errno) : "out of memory";
      throw std::runtime_error("cannot open " + name() + ": " + reason +
                               " (the Debian package dataset-fashion-mnist has it in "
                               "/usr/share/datasets/fashion-mnist)");
    }
    ::gzbuffer(file_.get(), 1 << 17);
  }

  std::uint32_t read_number(const std::string& what) {
    std::array<std::uint8_t, 4> bytes{};
    const std::size_t got = read(bytes);
    if (got < bytes.size()) fail("is truncated: it ends within the header, before " + what);
    return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 |
           std::uint32_t{bytes[2]} << 8 | bytes[3];
  }

  void expect_magic(std::uint32_t expected, const std::string& kind) {
    const std::uint32_t found = read_number("its kind");
    if (found != expected)
      fail("is not a file of " + kind + ": it starts with " + hex(found) + ", expected " +
           hex(expected));
  }

  std::uint32_t read_count(const std::string& what) {
    const std::uint32_t count = read_number("the number of " + what);
    if (count == 0 || count > kMaxCount) {
      fail("announces " + std::to_string(count) + " " + what + ", expected 1 to " +
           std::to_string(kMaxCount));
    }
    return count;
  }

  // The rest of the file, which must be `size` bytes: no more, no less.
  void read_rest(std::span<std::uint8_t> bytes, const std::string& what) {
    const std::size_t got = read(bytes);
    if (got < bytes.size()) {
      fail("is truncated: expected " + std::to_string(bytes.size()) + " bytes of " + what +
           ", found " + std::to_string(got));
    }
    std::array<std::uint8_t, 1> more{};
    if (read(more) != 0)
      fail("goes on after the " + std::to_string(bytes.size()) + " bytes of " + what +
           " that its header announces");
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(name() + " " + what);
  }

  [[nodiscard]] std::string name() const { return "\"" + path_.string() + "\""; }

 private:
  struct Close {
    void operator()(gzFile file) const { ::gzclose(file); }
  };

  // Fewer bytes than asked for at the end of the file only.
  std::size_t read(std::span<std::uint8_t> bytes) {
    std::size_t done = 0;
    while (done < bytes.size()) {
      const auto piece = static_cast<unsigned>(std::min<std::size_t>(bytes.size() - done, 1 << 24));
      const int got = ::gzread(file_.get(), bytes.data() + done, piece);
      if (got > 0) {
        done += static_cast<std::size_t>(got);
        continue;
      }
      int code = Z_OK;
      const char* text = ::gzerror(file_.get(), &code);
      // The compressed stream stops short: the caller says how much is missing.
      if (got == 0 || code == Z_BUF_ERROR) break;
      fail(std::string("is damaged: ") + (code == Z_ERRNO ? std::strerror(errno) : text));
    }
    return done;
  }

  static std::string hex(std::uint32_t value) {
    std::array<char, 16> text{};
    std::snprintf(text.data(), text.size(), "0x%08x", value);
    return text.data();
  }

  std::filesystem::path path_;
  std::unique_ptr<std::remove_pointer_t<gzFile>, Close> file_;
};

torch::Tensor read_images(IdxFile& file) {
  file.expect_magic(kImagesMagic, "images");
  const std::uint32_t count = file.read_count("images");
  const std::uint32_t rows = file.read_number("the images' height");
  const std::uint32_t columns = file.read_number("the images' width");
  if (rows != kSide || columns != kSide) {
    file.fail("has images of " + std::to_string(rows) + "x" + std::to_string(columns) +
              ", expected 28x28");
  }
  torch::Tensor bytes = torch::empty({count, kSide * kSide}, torch::kUInt8);
  file.read_rest({bytes.data_ptr<std::uint8_t>(), static_cast<std::size_t>(bytes.numel())},
                 "images");
  return bytes.to(torch::kFloat).div_(255);
}

torch::Tensor read_labels(IdxFile& file) {
  file.expect_magic(kLabelsMagic, "labels");
  const std::uint32_t count = file.read_count("labels");
  torch::Tensor bytes = torch::empty({count}, torch::kUInt8);
  const std::span<std::uint8_t> labels(bytes.data_ptr<std::uint8_t>(), count);
  file.read_rest(labels, "labels");
  if (const auto wrong =
          std::ranges::find_if(labels, [](std::uint8_t label) { return label >= kClasses; });
      wrong != labels.end()) {
    file.fail("has the label " + std::to_string(*wrong) + " at position " +
              std::to_string(wrong - labels.begin()) + ", expected 0 to 9");
  }
  return bytes.to(torch::kLong);
}

}  // namespace

FashionMnist read_fashion_mnist(const std::filesystem::path& folder, FashionMnistSplit split) {
  const std::string prefix = split == FashionMnistSplit::train ? "train" : "t10k";
  IdxFile images_file(folder / (prefix + "-images-idx3-ubyte.gz"));
  IdxFile labels_file(folder / (prefix + "-labels-idx1-ubyte.gz"));
  FashionMnist data{read_images(images_file), read_labels(labels_file)};
  if (data.images.size(0) != data.labels.size(0)) {
    throw std::runtime_error(labels_file.name() + " has " + std::to_string(data.labels.size(0)) +
                             " labels, but " + images_file.name() + " has " +
                             std::to_string(data.images.size(0)) + " images");
  }
  return data;
}
