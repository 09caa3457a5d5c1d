#include "stitch/transport/gpu/outgoing.h"

#include <string>
#include <utility>
#include <vector>

#include "stitch/base/random.h"
#include "stitch/transport/gpu/gpu_libraries.h"
#include "stitch/transport/gpu/transfers.h"

namespace stitch::transport::gpu {
namespace {

[[noreturn]] void unexpected(const char* frame, TransferId id) {
  throw Error(ErrorCode::protocol, std::string(frame) + " frame for transfer " +
                                       std::to_string(id) + ", which does not wait for one");
}

std::string version_text(int version) { return version == 0 ? "none" : nccl_version_text(version); }

}  // namespace

Outgoing::~Outgoing() {
  if (lane != nullptr) lane->post([owner = std::move(keep_alive)] {});
}

OutgoingPtr OutgoingTransfers::find(PeerId to, TransferId id) const {
  const base::MutexLock lock(mutex_);
  const auto at = table_.find(id);
  return at == table_.end() || at->second->to != to ? nullptr : at->second;
}

void OutgoingTransfers::add_to(DeviceTransfers::Counters& counters) const {
  const base::MutexLock lock(mutex_);
  counters.retries = retries_;
  counters.outgoing = table_.size();
}

// --- begin ---

void OutgoingTransfers::send(TransferId id, PeerId to, int to_device, DeviceSpan source,
                             cuda::Event ready, std::shared_ptr<const void> keep_alive,
                             DeviceTransfers::Done done) {
  Lane& lane = transfers_.lanes().lane(source.device);
  if (to_device < 0 || (source.data == nullptr && source.bytes > 0)) {
    throw Error(ErrorCode::invalid_argument,
                source.data == nullptr
                    ? "the bytes to send to device " + std::to_string(to_device) + " are null"
                    : "device " + std::to_string(to_device) + " cannot be a destination");
  }
  const OutgoingPtr transfer(new Outgoing{.id = id,
                                          .to = to,
                                          .to_device = to_device,
                                          .source = source,
                                          .ready = ready,
                                          .keep_alive = std::move(keep_alive),
                                          .lane = &lane,
                                          .done = std::move(done)});
  std::optional<Error> refused;
  {
    const base::MutexLock lock(mutex_);
    refused = transfers_.begin_transfer(to);
    table_.emplace(transfer->id, transfer);
  }
  if (!refused) transfers_.greet(to);
  lane.post([this, self = transfers_.self(), transfer, refused = std::move(refused)] {
    if (refused) {
      end(transfer, refused);
      return;
    }
    if (transfer->ready == nullptr) return begin(transfer);
    transfer->lane->watch([this, self, transfer, failures = 0]() mutable {
      const cuda::Status status = transfer->lane->query(transfer->ready);
      if (status == cuda::kNotReady) return false;
      if (status == cuda::kSuccess) {
        begin(transfer);
        return true;
      }
      // The kernel that makes the bytes may run all the same: the next round asks again.
      if (++failures < Lane::kMaxFailures) {
        transfer->lane->find_failure();
        if (!transfer->lane->failure()) return false;
      }
      cancel(transfer, transfer->lane->error_of(status, "the bytes to send are not made"));
      return true;
    });
  });
}

PathChoice OutgoingTransfers::choose(const Outgoing& transfer) {
  const std::optional<HelloFrame> hello = transfers_.hello_of(transfer.to);
  const auto to_device = static_cast<std::size_t>(transfer.to_device);
  {
    const base::MutexLock lock(mutex_);
    if (transfer.retried) return {};
  }
  if (!hello || to_device >= hello->device_uuids.size()) return {};
  const Lanes& lanes = transfers_.lanes();
  const Transfers::Options& options = transfers_.options();
  const int device = transfer.source.device;
  const PathEnd source{options.identity, lanes.uuids()[static_cast<std::size_t>(device)], device,
                       transfers_.own_nccl()};
  const PathEnd destination{hello->process, hello->device_uuids[to_device], transfer.to_device,
                            hello->nccl_version};
  PathStates states;
  if (options.use_peer && source.process == destination.process)
    states.peer = lanes.peer_state(device, transfer.to_device);
  states.nccl = transfers_.communicators().state(transfer.to, device, transfer.to_device);
  states.nccl_between_hosts = options.nccl_between_hosts;
  const PathChoice choice = choose_path(source, destination, states, transfer.source.bytes);
  report(transfer, choice, hello->nccl_version);
  return choice;
}

void OutgoingTransfers::report(const Outgoing& transfer, const PathChoice& choice,
                               int destination_nccl) {
  if (choice.sealed) {
    transfers_.report().say(transfer.to, PathReport::kSealed,
                            "NCCL is not used, pinned memory is: a secret is set, and NCCL "
                            "between hosts encrypts nothing");
  }
  const Transfers::Options& options = transfers_.options();
  if (!choice.versions_differ || !options.use_nccl) return;
  const int own = transfers_.own_nccl();
  const std::string why =
      own == 0 && !options.why_no_nccl.empty() ? " (" + options.why_no_nccl + ")" : "";
  transfers_.report().say(transfer.to, PathReport::kVersions,
                          "NCCL is not used, pinned memory is: it is " + version_text(own) + why +
                              " here and " + version_text(destination_nccl) +
                              " there, and has to be the same version at both ends");
}

void OutgoingTransfers::begin(const OutgoingPtr& transfer) {
  if (transfer->lane->failure()) return cancel(transfer, *transfer->lane->failure());
  Communicators& communicators = transfers_.communicators();
  const int device = transfer->source.device;
  const PathChoice choice = choose(*transfer);
  if (choice.open_nccl) communicators.open(transfer->to, *transfer->lane, transfer->to_device);
  if (choice.test_peer) transfers_.local_copies().test(transfer->to, device, transfer->to_device);
  RtsFrame rts;
  rts.id = transfer->id;
  rts.path = choice.path;
  rts.pair = {static_cast<std::uint32_t>(device), static_cast<std::uint32_t>(transfer->to_device),
              0};
  rts.bytes = transfer->source.bytes;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->state == Outgoing::State::ended) return;
    if (rts.path == Path::nccl) {
      auto entered =
          communicators.announce(transfer->to, device, transfer->to_device, transfer->id);
      if (entered.pair != nullptr) {
        rts.pair = entered.pair->name;
        rts.clock = entered.clock;
        transfer->pair = std::move(entered.pair);
        transfer->reading = true;
      } else {
        rts.path = Path::staging;  // the pair has broken meanwhile, or a LaneLock holds the device
      }
    } else if (rts.path == Path::local || rts.path == Path::peer) {
      rts.clock = base::random_number();
      transfers_.lanes().offer(
          transfers_.uid(), transfer->id,
          {device, transfer->source.data, transfer->source.bytes, transfer->keep_alive, rts.clock});
    }
    transfer->path = rts.path;
    transfer->state = Outgoing::State::announced;
  }
  if (rts.path == Path::nccl) communicators.start_watching();
  transfers_.send_frame(transfer->to, encode(rts));
}

// --- answers of the destination ---

void OutgoingTransfers::on_grant(PeerId from, const GrantFrame& frame) {
  const OutgoingPtr transfer = find(from, frame.id);
  if (transfer == nullptr) return;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->state == Outgoing::State::preparing || transfer->path != Path::staging)
      unexpected("GRANT", frame.id);
  }
  transfers_.staging().on_grant(transfer, frame);
}

void OutgoingTransfers::on_retry(PeerId from, TransferId id) {
  const OutgoingPtr transfer = find(from, id);
  if (transfer == nullptr) return;
  PairPtr pair;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->state == Outgoing::State::preparing || transfer->retried ||
        transfer->path == Path::staging) {
      unexpected("RETRY", id);
    }
    transfer->retried = true;
    transfer->finished.reset();
    pair = std::exchange(transfer->pair, nullptr);
    ++retries_;
    // Without a CTS before, the destination has not entered the transfer.
    if (pair != nullptr && transfers_.communicators().withdraw(pair, id)) {
      transfer->reading = false;
      pair.reset();
    }
  }
  // The destination retries the transfers of a broken pair; its COMM_BREAK may come later.
  if (pair != nullptr) {
    transfers_.communicators().break_pair(pair, Error(ErrorCode::internal, "broken by the peer"),
                                          false);
  }
  transfers_.lanes().withdraw(transfers_.uid(), transfer->id);
  transfer->lane->post([this, self = transfers_.self(), transfer] { begin(transfer); });
}

void OutgoingTransfers::on_finished(PeerId from, const FinishedFrame& frame) {
  const OutgoingPtr transfer = find(from, frame.id);
  // The transfer was cancelled here: its CANCEL comes to a destination that has forgotten it.
  if (transfer == nullptr) return transfers_.send_frame(from, encode(ForgetFrame{frame.id}));
  {
    const base::MutexLock lock(mutex_);
    if (transfer->state == Outgoing::State::preparing || transfer->finished)
      unexpected("FINISHED", frame.id);
    transfer->finished = frame;
    // Without a CTS before, the destination has not entered the transfer.
    if (frame.failed != 0 && transfer->pair != nullptr &&
        transfers_.communicators().withdraw(transfer->pair, frame.id)) {
      transfer->pair.reset();
      transfer->reading = false;
    }
  }
  end_if_finished(transfer);
}

// --- end ---

void OutgoingTransfers::stop_reading(const OutgoingPtr& transfer) {
  {
    const base::MutexLock lock(mutex_);
    transfer->reading = false;
  }
  end_if_finished(transfer);
}

void OutgoingTransfers::end_if_finished(const OutgoingPtr& transfer) {
  std::optional<Error> error;
  {
    const base::MutexLock lock(mutex_);
    if (transfer->state == Outgoing::State::ended || !transfer->finished || transfer->reading)
      return;
    if (transfer->finished->failed != 0)
      error = Error(ErrorCode::internal, transfer->finished->text).with_remote(true);
  }
  end(transfer, std::move(error));
}

bool OutgoingTransfers::end(const OutgoingPtr& transfer, std::optional<Error> error) {
  DeviceTransfers::Done done;
  Path path = Path::staging;
  {
    const base::MutexLock lock(mutex_);
    if (std::exchange(transfer->state, Outgoing::State::ended) == Outgoing::State::ended)
      return false;
    table_.erase(transfer->id);
    path = transfer->path;
    done = std::move(transfer->done);
    transfers_.end_transfer();
  }
  const int device = transfer->source.device;
  const int to_device = transfer->to_device;
  if (!error) {
    if (path == Path::nccl) transfers_.communicators().worked(transfer->to, device, to_device);
    if (path == Path::peer) transfers_.lanes().peer_worked(device, to_device);
    transfers_.report().count(transfer->to, device, path, true, transfer->source.bytes);
  }
  transfers_.lanes().withdraw(transfers_.uid(), transfer->id);
  transfers_.call_at_end(*transfer->lane, std::move(done), std::move(error));
  return true;
}

void OutgoingTransfers::cancel(const OutgoingPtr& transfer, const Error& error) {
  if (!end(transfer, error)) return;
  const auto code = static_cast<std::uint8_t>(error.code());
  transfers_.send_frame(transfer->to, encode(CancelFrame{transfer->id, code, error.what()}));
}

void OutgoingTransfers::cancel_all(std::optional<PeerId> peer, const Error& why) {
  std::vector<OutgoingPtr> ended;
  {
    const base::MutexLock lock(mutex_);
    for (const auto& [id, transfer] : table_) {
      if (!peer || transfer->to == peer) ended.push_back(transfer);
    }
  }
  for (const OutgoingPtr& transfer : ended) cancel(transfer, why);
}

}  // namespace stitch::transport::gpu
