#include "call_book.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <system_error>

namespace stitch_reliability {

namespace {

CallBook* the_book = nullptr;

}  // namespace

const char* to_string(Kind kind) {
  static constexpr std::array<const char*, kKinds> kNames{
      "call",   "call with tensors", "one-way call",  "nested call", "object made",
      "method", "backward pass",     "optimizer step"};
  return kNames.at(static_cast<std::size_t>(kind));
}

CallBook& CallBook::make() {
  void* const memory = ::mmap(nullptr, sizeof(CallBook), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "cannot map the book of calls");
  // All zero, which is what each of its members begins with but the next number.
  the_book = static_cast<CallBook*>(memory);
  the_book->next_ = 1;
  return *the_book;
}

CallBook& book() { return *the_book; }

std::uint64_t CallBook::begin(Kind kind, int life) {
  const std::uint64_t number = next_.fetch_add(1);
  if (number >= kMaxOperations) {
    next_ = kMaxOperations;
    throw std::runtime_error("the book of calls is full: " + std::to_string(kMaxOperations));
  }
  operations_[number].life = static_cast<std::uint16_t>(life);
  operations_[number].kind = kind;
  return number;
}

void CallBook::run(std::uint64_t number) {
  if (number == 0 || number >= kMaxOperations) {
    ++wrong;
    return;
  }
  ++operations_[number].runs;
}

void CallBook::end(std::uint64_t number, Outcome outcome) {
  operations_[number].outcome = outcome;
  ++operations_[number].ends;
}

void CallBook::end(std::uint64_t number, const stitch::Error& error) {
  const Outcome outcome = outcome_of(error);
  Sample& sample = samples.at(outcome);
  if (!sample.taken.exchange(true))
    std::snprintf(sample.text.data(), sample.text.size(), "%s", error.what());
  end(number, outcome);
}

std::int64_t own_kib(const std::string& process) {
  std::ifstream status("/proc/" + process + "/status");
  for (std::string word; status >> word;) {
    std::int64_t kib = 0;
    if (word == "RssAnon:" && status >> kib) return kib;
  }
  return 0;
}

}  // namespace stitch_reliability
