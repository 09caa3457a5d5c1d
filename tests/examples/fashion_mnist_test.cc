#include "examples/support/fashion_mnist.h"

#include <zlib.h>

#include "tests/support/plain_test.h"

namespace fashion_mnist_test {
namespace {

std::string big_endian(std::uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16),
          static_cast<char>(value >> 8), static_cast<char>(value)};
}

// The bytes of an images file: all pixels of image i have the value i.
std::string images(std::uint32_t count, std::uint32_t rows = 28, std::uint32_t columns = 28) {
  std::string bytes =
      big_endian(0x803) + big_endian(count) + big_endian(rows) + big_endian(columns);
  for (std::uint32_t i = 0; i < count; ++i)
    bytes += std::string(std::size_t{rows} * columns, static_cast<char>(i));
  return bytes;
}

std::string labels(std::uint32_t count) {
  std::string bytes = big_endian(0x801) + big_endian(count);
  for (std::uint32_t i = 0; i < count; ++i) bytes += static_cast<char>(i % 10);
  return bytes;
}

// A folder with a small valid data set, which each test damages in its own way.
class FashionMnistFiles : public ::testing::Test {
 protected:
  FashionMnistFiles() {
    write(images_, images(20));
    write(labels_, labels(20));
  }

  void write(const std::string& name, const std::string& bytes) const {
    gzFile file = ::gzopen((folder_ / name).c_str(), "wb");
    ASSERT_NE(file, nullptr);
    EXPECT_EQ(::gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size())),
              static_cast<int>(bytes.size()));
    ::gzclose(file);
  }

  // The text of the error of reading the folder, without the folder's name.
  std::string error() const {
    try {
      (void)read_fashion_mnist(folder_, FashionMnistSplit::train);
    } catch (const std::runtime_error& error) {
      std::string text = error.what();
      const std::string prefix = folder_.string() + "/";
      for (auto at = text.find(prefix); at != std::string::npos; at = text.find(prefix))
        text.erase(at, prefix.size());
      return text;
    }
    return "no error";
  }

  const stitch::testing::TemporaryFolder temporary_;
  const std::filesystem::path folder_ = temporary_.path();
  const std::string images_ = "train-images-idx3-ubyte.gz";
  const std::string labels_ = "train-labels-idx1-ubyte.gz";
};

TEST_F(FashionMnistFiles, AreReadAsTensors) {
  const FashionMnist data = read_fashion_mnist(folder_, FashionMnistSplit::train);
  EXPECT_EQ(data.count(), 20);
  EXPECT_EQ(data.images.sizes(), (std::vector<std::int64_t>{20, 784}));
  EXPECT_EQ(data.images.scalar_type(), torch::kFloat);
  EXPECT_EQ(data.labels.scalar_type(), torch::kLong);
  EXPECT_FLOAT_EQ(data.images[19][783].item<float>(), 19.f / 255);
  EXPECT_EQ(data.labels[13].item<std::int64_t>(), 3);
}

TEST_F(FashionMnistFiles, OfTheDebianPackageAreComplete) {
  const std::filesystem::path folder = "/usr/share/datasets/fashion-mnist";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "dataset-fashion-mnist is not installed";
  EXPECT_EQ(read_fashion_mnist(folder, FashionMnistSplit::train).count(), 60000);
  const FashionMnist test = read_fashion_mnist(folder, FashionMnistSplit::test);
  EXPECT_EQ(test.count(), 10000);
  EXPECT_EQ(test.images.min().item<float>(), 0);
  EXPECT_EQ(test.images.max().item<float>(), 1);
  EXPECT_TRUE(torch::equal(test.labels.bincount(), torch::full({10}, 1000, torch::kLong)));
}

TEST_F(FashionMnistFiles, ThatAreMissingAreNamedWithTheirDebianPackage) {
  std::filesystem::remove(folder_ / labels_);
  EXPECT_EQ(error(),
            "cannot open \"train-labels-idx1-ubyte.gz\": No such file or directory (the Debian "
            "package dataset-fashion-mnist has it in "
            "/usr/share/datasets/fashion-mnist)");
}

TEST_F(FashionMnistFiles, ThatAreDamagedAreRefusedWithTheReason) {
  const std::string good = images(20), some = labels(20);
  const auto fail = [&](const std::string& of_images, const std::string& of_labels) {
    write(images_, of_images);
    write(labels_, of_labels);
    return error();
  };
  std::string unknown = some;
  unknown[8 + 7] = 77;
  const std::string impossible =
      big_endian(0x803) + big_endian(0xffffffff) + big_endian(28) + big_endian(28);
  const std::string in_images = "\"train-images-idx3-ubyte.gz\" ";
  const std::string in_labels = "\"train-labels-idx1-ubyte.gz\" ";
  EXPECT_EQ(fail(some, some), in_images +
                                  "is not a file of images: it starts with 0x00000801, "
                                  "expected 0x00000803");
  EXPECT_EQ(fail(good.substr(0, good.size() - 1), some),
            in_images + "is truncated: expected 15680 bytes of images, found 15679");
  EXPECT_EQ(fail(good, some + "x"),
            in_labels + "goes on after the 20 bytes of labels that its header announces");
  EXPECT_EQ(fail(impossible, some),
            in_images + "announces 4294967295 images, expected 1 to 1000000");
  EXPECT_EQ(fail(images(20, 32, 28), some), in_images + "has images of 32x28, expected 28x28");
  EXPECT_EQ(fail(good, unknown), in_labels + "has the label 77 at position 7, expected 0 to 9");
  EXPECT_EQ(fail(good, labels(19)),
            in_labels + "has 19 labels, but \"train-images-idx3-ubyte.gz\" has 20 images");

  const auto path = folder_ / images_;
  fail(good, some);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
  EXPECT_TRUE(
      error().starts_with(in_images + "is truncated: expected 15680 bytes of images, found "))
      << error();
  fail(good, some);
  std::fstream(path, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(14)
      .write("\xff\xff\xff\xff", 4);
  EXPECT_TRUE(error().starts_with(in_images + "is damaged: ")) << error();
  std::ofstream(path, std::ios::trunc);
  EXPECT_EQ(error(), in_images + "is truncated: it ends within the header, before its kind");
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  EXPECT_EQ(error(), in_images + "is a folder, not a file");
}

}  // namespace
}  // namespace fashion_mnist_test
