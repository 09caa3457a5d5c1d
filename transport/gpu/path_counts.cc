// What is counted of each path, and how a path that failed waits to be tried again.

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "stitch/transport/gpu/device_transfers_impl.h"
#include "stitch/transport/gpu/gpu_libraries.h"

namespace stitch::transport::gpu {

void DeviceTransfers::Impl::count(PeerId peer, int device, Path path, bool sent,
                                  std::size_t bytes) {
  PathCount& entry = counts_[{peer, device, path, sent}];
  entry.peer = peer;
  entry.device = device;
  entry.path = path;
  entry.sent = sent;
  ++entry.messages;
  entry.bytes += bytes;
}

void DeviceTransfers::Impl::path_worked(const Outgoing& transfer) {
  const auto source = static_cast<std::uint32_t>(transfer.source.device);
  const auto destination = static_cast<std::uint32_t>(transfer.to_device);
  if (transfer.path == Path::nccl) {
    const auto at = slots_.find({transfer.to, End::source, source, destination});
    if (at != slots_.end()) at->second.pause.success();
  } else if (transfer.path == Path::peer) {
    lanes_.peer_worked(transfer.source.device, transfer.to_device);
  }
}

void DeviceTransfers::Impl::path_failed(PeerId peer, int device, Path path, const char* why) {
  if (peers_[peer].lost) return;
  ++failures_[{peer, device, path}];
  say(peer, static_cast<unsigned>(path),
      {to_string(path), " of device ", std::to_string(device),
       " is not used, pinned memory is: ", why});
}

void DeviceTransfers::Impl::say(PeerId peer, unsigned reason,
                                std::initializer_list<std::string_view> parts) noexcept {
  const auto at = peers_.find(peer);
  const unsigned bit = 1U << reason;
  if (!options_.say || closing_ || at == peers_.end() || at->second.lost) return;
  if ((at->second.said & bit) != 0) return;
  try {
    std::string text;
    for (const std::string_view part : parts) text += part;
    lanes_.connector().post_at(Clock::now(),
                               [self = shared_from_this(), peer, text = std::move(text)] {
                                 const CallOut call(*self);
                                 if (call) self->options_.say(peer, text);
                               });
    at->second.said |= bit;
  } catch (...) {
    // Without memory: the next time, if there is one.
  }
}

void DeviceTransfers::Impl::say_versions(PeerId peer, int theirs) {
  const auto text = [](int version) { return version == 0 ? "none" : nccl_version_text(version); };
  const bool none_here = own_nccl() == 0 && !options_.why_no_nccl.empty();
  say(peer, kVersions,
      {"NCCL is not used, pinned memory is: it is ", text(own_nccl()), none_here ? " (" : "",
       none_here ? std::string_view(options_.why_no_nccl) : "",
       none_here ? ") here and " : " here and ", text(theirs),
       " there, and has to have the same major and minor number at both ends"});
}

DeviceTransfers::Counters DeviceTransfers::Impl::counters() const {
  const base::MutexLock lock(mutex_);
  Counters counters;
  for (const auto& [key, entry] : counts_) counters.paths.push_back(entry);
  for (const auto& [key, failures] : failures_) {
    const auto& [peer, device, path] = key;
    counters.failures.push_back({peer, device, path, failures});
  }
  for (const auto& [key, slot] : slots_) {
    if (std::get<1>(key) == End::source && slot.pair == nullptr && !slot.pause.over())
      ++counters.paused;
  }
  for (const auto& [token, pair] : ordered_) ++counters.communicators[pair->lane->device()];
  counters.paused += lanes_.paused_peers();
  counters.nccl_version = own_nccl();
  for (const auto& [id, peer] : peers_) {
    if (peer.hello && !peer.lost) counters.peers_nccl.emplace_back(id, peer.hello->nccl_version);
  }
  for (int device = 0; device < lanes_.device_count(); ++device) {
    if (lanes_.quarantined(device)) counters.without_nccl.push_back(device);
    if (lanes_.held(device)) counters.held.push_back(device);
    if (lanes_.lost(device)) counters.lost.push_back(device);
  }
  counters.silences = silences_;
  counters.breaks = breaks_;
  counters.retries = retries_;
  counters.outgoing = outgoing_.size();
  counters.incoming = incoming_.size();
  return counters;
}

std::size_t DeviceTransfers::Impl::under_way() const {
  const base::MutexLock lock(mutex_);
  return outgoing_.size() +
         static_cast<std::size_t>(std::count_if(incoming_.begin(), incoming_.end(),
                                                [](const auto& at) { return at.second->wanted; }));
}

}  // namespace stitch::transport::gpu
