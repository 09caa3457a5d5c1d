#include "stitch/base/forked.h"

#include <pthread.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <new>

namespace stitch::base {

namespace {

// A set of descriptor numbers: a table of bits that grows by pages and never shrinks.
constexpr std::size_t kWordBits = 64;
constexpr std::size_t kPageWords = 64;
constexpr std::size_t kPageBits = kWordBits * kPageWords;
constexpr std::size_t kPages = 256;  // a million descriptors: the most a process has by default

struct Page {
  std::array<std::atomic<std::uint64_t>, kPageWords> words{};
};
constinit std::array<std::atomic<Page*>, kPages> pages{};

// Null when the number is too large, or there is no memory for its page.
std::atomic<std::uint64_t>* word_of(int fd, bool make) noexcept {
  if (fd < 0 || static_cast<std::size_t>(fd) >= kPages * kPageBits) return nullptr;
  const auto number = static_cast<std::size_t>(fd);
  std::atomic<Page*>& slot = pages[number / kPageBits];
  Page* page = slot.load(std::memory_order_acquire);
  if (page == nullptr && make) {
    auto* const fresh = new (std::nothrow) Page;
    if (fresh != nullptr && slot.compare_exchange_strong(page, fresh)) {
      page = fresh;
    } else {
      delete fresh;
    }
  }
  return page == nullptr ? nullptr : &page->words[number % kPageBits / kWordBits];
}

constexpr std::uint64_t bit_of(int fd) noexcept {
  return std::uint64_t{1} << (static_cast<std::size_t>(fd) % kWordBits);
}

// Calls `take` with each word of the table, and `visit` with each descriptor in what it returns.
template <typename Take, typename Visit>
void visit_words(Take take, Visit visit) noexcept {
  for (std::size_t at = 0; at < kPages; ++at) {
    Page* const page = pages[at].load();
    if (page == nullptr) continue;
    for (std::size_t i = 0; i < kPageWords; ++i) {
      std::uint64_t left = take(page->words[i]);
      for (int bit = 0; left != 0; ++bit, left >>= 1) {
        if ((left & 1) != 0) visit(static_cast<int>(at * kPageBits + i * kWordBits) + bit);
      }
    }
  }
}

// Async-signal-safe calls only.
void in_child() noexcept {
  detail::forks_so_far.fetch_add(1);
  visit_words([](auto& word) { return word.exchange(0); }, [](int fd) { ::close(fd); });
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, &in_child);

}  // namespace

void close_in_children(int fd) noexcept {
  if (auto* const word = word_of(fd, true)) word->fetch_or(bit_of(fd));
}

void keep_in_children(int fd) noexcept {
  if (auto* const word = word_of(fd, false)) word->fetch_and(~bit_of(fd));
}

void visit_closed_in_children(void (*visit)(int fd)) noexcept {
  visit_words([](const auto& word) { return word.load(); }, visit);
}

}  // namespace stitch::base
