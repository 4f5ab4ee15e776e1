// A warp's stages in shared memory, and the loads that fill them.
#pragma once

#include <cstdint>

#include "cuda/ptx/async_copy.cuh"
#include "ops/mamba2/cuda/copy_tiles.cuh"
#include "ops/mamba2/cuda/row.cuh"

namespace replayssm::cuda {

/// kWindowSteps: blocks of sixteen window entries (places of the ring).
template <typename State, typename Act, int kStateSize, int kWindowSteps, ReadCopyFormat kCopy>
class Mamba2Pipeline : protected Mamba2Row<State, Act, kStateSize> {
  using Base = Mamba2Row<State, Act, kStateSize>;

 protected:
  using Base::entry_x, Base::position, Base::slot, Base::state, Base::tile_begin;
  using Base::first_tile, Base::lane, Base::launch, Base::live, Base::own, Base::p, Base::places;
  using Base::tile_end, Base::warp, Base::zero;
  using typename Base::Position;
  using Kind = PlannedRow::Kind;

  static constexpr bool kHasCopy = kCopy != ReadCopyFormat::kNone;
  static constexpr bool kMayPrefetch = sizeof(State) == 4 && !kHasCopy;
  using Copy = Mamba2CopyTiles<kCopy, kStateSize>;
  static constexpr int kTileBytes = kTileRows * kStateSize * static_cast<int>(sizeof(State));
  static constexpr int kActPerChunk = 16 / static_cast<int>(sizeof(Act));
  static constexpr int kXChunks = kTileRows / kActPerChunk;  // 16-byte chunks of a tile's x
  // Entries that a load of x by all lanes has.
  static constexpr int kXEntries = kWarpLanes / kXChunks;
  static constexpr int kXPointers = 16 * kWindowSteps == 2 * kXEntries ? 2 : 1;

  __device__ __forceinline__ Mamba2Pipeline(const Mamba2CudaParams& params,
                                            const Mamba2Launch& launch_shape,
                                            unsigned char* shared_memory)
      : Base(params, launch_shape), shared(shared_memory) {}

  // ---- Shared memory, all of it private to a warp ----

  template <Kind kKind>
  static constexpr bool kReadsCopy = kHasCopy && kKind == PlannedRow::kReplay;

  /// The warp's buffers in turn. A row that folds has fewer, and scratch memory behind them.
  struct Stage {
    unsigned char* at;
    std::uint64_t* barrier;
    int index = 0;
    std::uint32_t parity = 0;
  };
  __device__ __forceinline__ Stage first_stage() const {
    return {shared + warp * launch.shared.warp_bytes,
            reinterpret_cast<std::uint64_t*>(shared + launch.shared.barrier_offset) +
                warp * launch.stages};
  }
  template <Kind kKind>
  __device__ __forceinline__ void move_on(Stage& stage) const {
    const int bytes =
        kReadsCopy<kKind> ? launch.shared.copy_stage_bytes : launch.shared.stage_bytes;
    stage.at += bytes;
    ++stage.barrier;
    const int stages = stages_of<kKind>();
    if (++stage.index < stages) return;
    stage.at -= stages * bytes;
    stage.barrier -= stages;
    stage.index = 0;
    stage.parity ^= 1;
  }
  static __device__ __forceinline__ State* stage_state(unsigned char* stage) {
    return reinterpret_cast<State*>(stage);
  }
  /// Where the x of a stage's first tile lies; tiles follow each other.
  template <Kind kKind>
  __device__ __forceinline__ Act* stage_x(unsigned char* stage) const {
    return reinterpret_cast<Act*>(
        stage + (kReadsCopy<kKind> ? launch.shared.copy_x_offset : launch.shared.stage_x_offset));
  }

  __device__ __forceinline__ CopyTile copy_in_memory(const Position& at) const {
    return ReadCopyTiles<kCopy>::in_memory(p.copy, slot, at.head, launch.head_dim, at.p0,
                                           kStateSize);
  }
  /// The first tile of a copy in a stage: of those that a replaying row reads, or of the one that
  /// others encode over its tile.
  template <Kind kKind>
  __device__ __forceinline__ CopyTile copy_in_stage(unsigned char* stage) const {
    return Copy::in_stage(stage, kStateSize, 0, kReadsCopy<kKind> ? launch.copy_tiles : 1);
  }

  // ---- Loading ----

  // Pointers into tiles move along with the tiles, so that a tile costs additions only.

  /// Before anything is loaded, which the fence would wait for.
  __device__ __forceinline__ void prepare_barriers() const {
    if (lane < launch.stages) ptx::mbarrier_init(first_stage().barrier + lane, kWarpLanes + 1);
    ptx::fence_mbarrier_init();
    __syncwarp();
  }

  template <Kind kKind>
  __device__ __forceinline__ void start_pipeline() {
    const int stages = stages_of<kKind>();
    Stage stage = first_stage();
    tile_ahead = tile_begin;
    rows_ahead = first_tile.p0;
    if constexpr (kReadsCopy<kKind>) {
      copy_ahead = copy_in_memory(first_tile);
    } else {
      state_ahead = state(first_tile);
    }
#pragma unroll
    for (int i = 0; i < kXPointers; ++i) {
      const int entry = i * kXEntries + lane / kXChunks;
      x_ahead[i] = entry_x(first_tile, entry) + lane % kXChunks * kActPerChunk;
    }
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      load_stage<kKind>(stage);
      move_on<kKind>(stage);
    }
  }

  template <Kind kKind>
  __device__ __forceinline__ bool folds() const {
    return kKind == PlannedRow::kFlush || (kKind == PlannedRow::kCommitted && live > 0);
  }

  template <Kind kKind>
  __device__ __forceinline__ int stages_of() const {
    return folds<kKind>()                    ? launch.fold_stages
           : kKind == PlannedRow::kCommitted ? launch.state_stages
                                             : launch.stages;
  }

  /// Starts the loads of the next tile, or tiles of a read copy, into a stage: the state, and x of
  /// the records and the own tokens.
  template <Kind kKind>
  __device__ __forceinline__ void load_stage(const Stage& stage) {
    const int tiles =
        kReadsCopy<kKind> ? min(launch.copy_tiles, tile_end - tile_ahead) : tile_end - tile_ahead;
    if (tiles <= 0) return;
    if constexpr (kReadsCopy<kKind>) {
      if (!zero) {
        Copy::load(copy_ahead, copy_in_stage<kKind>(stage.at), kStateSize, tiles, stage.barrier,
                   lane);
      }
      copy_ahead = Copy::moved(copy_ahead, tiles);
      if (lane == 0) ptx::mbarrier_arrive(stage.barrier);
    } else if (ptx::kHasBulkCopy) {
      if (lane == 0) {
        if (zero) {
          ptx::mbarrier_arrive(stage.barrier);
        } else {
          ptx::mbarrier_arrive_expect(stage.barrier, kTileBytes);
          ptx::bulk_copy(stage.at, state_ahead, kTileBytes, stage.barrier, ptx::kEvictFirst);
          const int stages = stages_of<kKind>();
          if (kMayPrefetch && launch.prefetch_bytes != 0 && tiles > stages) {
            ptx::prefetch_bulk(state_ahead + stages * kTileRows * kStateSize,
                               launch.prefetch_bytes);
          }
        }
      }
    } else {
      if (lane == 0) ptx::mbarrier_arrive(stage.barrier);
      if (!zero) {
        const unsigned char* from = reinterpret_cast<const unsigned char*>(state_ahead);
        for (int i = lane * 16; i < kTileBytes; i += kWarpLanes * 16) {
          ptx::copy_async_16(stage.at + i, from + i);
        }
      }
    }
    Act* x = stage_x<kKind>(stage.at);
    if constexpr (kReadsCopy<kKind>) {
      load_x_of_tiles(x, tiles);
    } else {
      load_x<kKind>(x);
    }
    ptx::copy_async_arrive(stage.barrier);
  }

  /// Starts the loads of a tile's x, and moves on by a tile.
  template <Kind kKind>
  __device__ __forceinline__ void load_x(Act* x) {
    const int chunks = (live + own) * kXChunks;
    if (lane < chunks) ptx::copy_async_16(x + lane * kActPerChunk, x_ahead[0]);
    if constexpr (kXPointers == 2) {
      if (lane < chunks - kWarpLanes) {
        ptx::copy_async_16(x + (kWarpLanes + lane) * kActPerChunk, x_ahead[1]);
      }
    } else {
      if (chunks > kWarpLanes) load_more_x(x, chunks);
    }
    if constexpr (!kReadsCopy<kKind>) state_ahead += kTileRows * kStateSize;
    move_ahead(1, kTileRows);
  }

  /// The same for tiles of a read copy.
  __device__ __forceinline__ void load_x_of_tiles(Act* x, int tiles) {
    const int stride = places * kTileRows;
    if (rows_ahead + tiles * kTileRows > launch.head_dim || live + own > kXEntries) {
#pragma unroll 1
      for (int i = 0; i < tiles; ++i) load_x<PlannedRow::kReplay>(x + i * stride);
      return;
    }
    // Of one head, and a chunk per lane and tile: the common case.
    const bool mine = lane < (live + own) * kXChunks;
    Act* to = x + lane * kActPerChunk;
#pragma unroll
    for (int i = 0; i < kMamba2MaxCopyTiles; ++i) {
      if (mine && i < tiles) ptx::copy_async_16(to + i * stride, x_ahead[0] + i * kTileRows);
    }
    move_ahead(tiles, kTileRows * tiles);
  }

  __device__ __forceinline__ void move_ahead(int tiles, int rows) {
    tile_ahead += tiles;
    rows_ahead += rows;
#pragma unroll
    for (int i = 0; i < kXPointers; ++i) x_ahead[i] += rows;
    if (rows_ahead == launch.head_dim) {
      rows_ahead = 0;
      state_ahead += launch.state_jump;
#pragma unroll
      for (int i = 0; i < kXPointers; ++i) {
        x_ahead[i] += i * kXEntries + lane / kXChunks < live ? launch.ring_x_jump : launch.x_jump;
      }
    }
  }

  /// The chunks of x beyond one per lane.
  __device__ __forceinline__ void load_more_x(Act* x, int chunks) const {
    const Position at = position(tile_ahead);
#pragma unroll 1
    for (int i = kWarpLanes + lane; i < chunks; i += kWarpLanes) {
      const int entry = i / kXChunks;
      ptx::copy_async_16(x + i * kActPerChunk, entry_x(at, entry) + i % kXChunks * kActPerChunk);
    }
  }

  unsigned char* shared;
  int tile_ahead, rows_ahead;  // the next tile to load, and its first row in its head
  const State* state_ahead;
  CopyTile copy_ahead;
  const Act* x_ahead[kXPointers];  // its x, the chunks of entries i kXEntries + lane / kXChunks
};

}  // namespace replayssm::cuda
