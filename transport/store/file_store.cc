#include "stitch/transport/store/file_store.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string_view>
#include <utility>

#include "stitch/base/deadline.h"
#include "stitch/base/mutex.h"
#include "stitch/transport/store/file_log.h"
#include "stitch/transport/store/store_map.h"

namespace stitch::transport {

namespace {

constexpr std::chrono::milliseconds kLongestPause{8};
// A file that is larger, and has so many bytes for each that is needed, is written anew.
constexpr std::uint64_t kMinRewrittenBytes = std::uint64_t{4} << 20;
constexpr std::uint64_t kMaxGrowth = 4;

// A record is {u8 operation, u32 length of the key, key, value}.
enum class Operation : char { set = 1, erase = 2 };

std::string encode(Operation operation, const std::string& key, const std::string& value) {
  const auto length = static_cast<std::uint32_t>(key.size());
  std::string record(1 + sizeof(length), '\0');
  record[0] = static_cast<char>(operation);
  std::memcpy(record.data() + 1, &length, sizeof(length));
  return record + key + value;
}

class FileStore final : public Store {
 public:
  explicit FileStore(const std::string& path)
      : log_(
            path, [this](std::string_view record) { replay(record); }, [this] { restart(); }) {}

  void set(const std::string& key, const std::string& value) override {
    in_store(name_, [&] {
      check_key(key);
      check_value(key, value);
    });
    const base::MutexLock lock(mutex_);
    FileLog::Writer writer(log_);
    append(writer, Operation::set, key, value);
  }

  std::string get(const std::string& key, Timeout timeout) override {
    in_store(name_, [&] { check_key(key); });
    const base::MutexLock lock(mutex_);
    wait_for({key}, timeout);
    return *map_.find(key);
  }

  std::optional<std::string> try_get(const std::string& key) override {
    in_store(name_, [&] { check_key(key); });
    const base::MutexLock lock(mutex_);
    log_.catch_up(std::chrono::steady_clock::time_point::max());
    const std::string* value = map_.find(key);
    if (value == nullptr) return std::nullopt;
    return *value;
  }

  void wait(const std::vector<std::string>& keys, Timeout timeout) override {
    in_store(name_, [&] { check_keys(keys); });
    const base::MutexLock lock(mutex_);
    wait_for(keys, timeout);
  }

  std::int64_t add(const std::string& key, std::int64_t delta) override {
    in_store(name_, [&] { check_key(key); });
    const base::MutexLock lock(mutex_);
    FileLog::Writer writer(log_);
    std::int64_t sum = 0;
    try {
      sum = map_.sum(key, delta);
    } catch (const Error& error) {
      throw in_store(error, name_);
    }
    append(writer, Operation::set, key, std::to_string(sum));
    return sum;
  }

  std::string compare_and_set(const std::string& key, const std::optional<std::string>& expected,
                              const std::string& desired) override {
    in_store(name_, [&] { check_compare(key, expected, desired); });
    const base::MutexLock lock(mutex_);
    FileLog::Writer writer(log_);
    if (map_.matches(key, expected)) append(writer, Operation::set, key, desired);
    const std::string* value = map_.find(key);
    return value == nullptr ? std::string() : *value;
  }

  bool erase(const std::string& key) override {
    in_store(name_, [&] { check_key(key); });
    const base::MutexLock lock(mutex_);
    FileLog::Writer writer(log_);
    if (map_.find(key) == nullptr) return false;
    append(writer, Operation::erase, key, "");
    return true;
  }

  std::string describe() const override { return name_; }

 private:
  void append(FileLog::Writer& writer, Operation operation, const std::string& key,
              const std::string& value) STITCH_REQUIRES(mutex_) {
    writer.append(encode(operation, key, value));
    changed_.notify_all();
    if (log_.bytes() > std::max({kMinRewrittenBytes, kMaxGrowth * live_bytes_, rewrite_at_}))
      rewrite(writer);
  }

  // That the file is too long is no reason for what was asked to fail.
  void rewrite(FileLog::Writer& writer) STITCH_REQUIRES(mutex_) {
    try {
      writer.rewrite([this](const FileLog::Writer::Put& put) STITCH_NO_THREAD_SAFETY_ANALYSIS {
        map_.for_each([&](const std::string& key, const std::string& value) {
          put(encode(Operation::set, key, value));
        });
      });
      rewrite_at_ = 0;
    } catch (const std::exception&) {
      rewrite_at_ = 2 * log_.bytes();  // the folder may be another user's, or the disk full
    }
  }

  void restart() STITCH_NO_THREAD_SAFETY_ANALYSIS {
    map_.clear_values();
    live_bytes_ = 0;
    rewrite_at_ = 0;
  }

  // Of its record, roughly.
  static std::uint64_t bytes_of(const std::string& key, const std::string& value) {
    constexpr std::uint64_t kOtherBytes = 17;
    return kOtherBytes + key.size() + value.size();
  }

  // Called by log_, which is only used under mutex_; the analysis cannot follow the callback.
  void replay(std::string_view record) STITCH_NO_THREAD_SAFETY_ANALYSIS {
    std::uint32_t length = 0;
    if (record.size() < 1 + sizeof(length)) throw damaged();
    std::memcpy(&length, record.data() + 1, sizeof(length));
    const auto operation = static_cast<Operation>(record[0]);
    record.remove_prefix(1 + sizeof(length));
    if (length > record.size()) throw damaged();
    const std::string key(record.substr(0, length));
    const std::string* former = map_.find(key);
    const std::uint64_t freed = former == nullptr ? 0 : bytes_of(key, *former);
    if (operation == Operation::set) {
      std::string value(record.substr(length));
      const std::uint64_t added = bytes_of(key, value);
      map_.set(key, std::move(value));
      live_bytes_ += added - freed;
    } else if (operation == Operation::erase) {
      map_.erase(key);
      live_bytes_ -= freed;
    } else {
      throw damaged();
    }
  }

  // The name of log_, which has it while its constructor replays the file; name_ is made later.
  Error damaged() const STITCH_NO_THREAD_SAFETY_ANALYSIS {
    return Error(ErrorCode::protocol, log_.describe() + " is damaged: a record makes no sense");
  }

  // Changes by threads of this process are signalled; for those by other processes the file is
  // polled at growing intervals. The last worker to arrive keeps the others of its world waiting,
  // several times in a row, for up to the longest; a look at the file is two system calls.
  void wait_for(const std::vector<std::string>& keys, Timeout timeout) STITCH_REQUIRES(mutex_) {
    using std::chrono::milliseconds;
    const auto deadline = base::deadline_after(timeout);
    milliseconds pause{1};
    for (;;) {
      log_.catch_up(deadline);
      const std::vector<std::string> missing = map_.missing(keys);
      if (missing.empty()) return;
      const auto now = std::chrono::steady_clock::now();
      if (now >= deadline) throw in_store(not_set_error(missing, timeout), name_);
      changed_.wait_until(mutex_, std::min(deadline, now + pause));
      pause = std::min(2 * pause, kLongestPause);
    }
  }

  base::Mutex mutex_;
  base::CondVar changed_;
  StoreMap map_ STITCH_GUARDED_BY(mutex_);
  std::uint64_t live_bytes_ STITCH_GUARDED_BY(mutex_) = 0;  // what the records in map_ take
  std::uint64_t rewrite_at_ STITCH_GUARDED_BY(mutex_) = 0;  // not before, after a failure
  FileLog log_ STITCH_GUARDED_BY(mutex_);  // after map_: its constructor fills that
  const std::string name_ = log_.describe();
};

}  // namespace

std::shared_ptr<Store> make_file_store(const std::string& path) {
  return std::make_shared<FileStore>(path);
}

}  // namespace stitch::transport
