/* The model store's client. Made of src/lib.rs by cbindgen: change that.
 *
 * A function that can fail takes a buffer for an error text (may be NULL). Nothing here is thread-safe on the same object, except
 * gshare_model_release of different models. Text is UTF-8. */

#ifndef GSHARE_STORE_H
#define GSHARE_STORE_H

#include <stddef.h>
#include <stdint.h>

/*
 Memory of the GPU.
 */
#define GSHARE_TIER_GPU 0

/*
 Host memory.
 */
#define GSHARE_TIER_HOST 1

/*
 Only the owner may read.
 */
#define GSHARE_ACCESS_PRIVATE 0

/*
 The owner's group may read.
 */
#define GSHARE_ACCESS_GROUP 1

/*
 Everybody may read.
 */
#define GSHARE_ACCESS_PUBLIC 2

/*
 The store is gone. Codes below 100 are the store's; these are of this side.
 */
#define GSHARE_ERROR_GONE 100

/*
 An argument that cannot be.
 */
#define GSHARE_ERROR_ARGUMENT 101

/*
 The system refuses something, or the store speaks another language.
 */
#define GSHARE_ERROR_SYSTEM 102

/*
 A model that was taken.
 */
typedef struct gshare_model gshare_model;

/*
 A connection to a store.
 */
typedef struct gshare_store gshare_store;

/*
 A tensor of a model. Pointers stay good until the model is released; no process can write to `data`.
 */
typedef struct gshare_tensor {
  /*
   Not terminated.
   */
  const char *name;
  /*
   How long the name is.
   */
  uint64_t name_bytes;
  /*
   Its dimensions.
   */
  const uint64_t *shape;
  /*
   How many.
   */
  uint64_t rank;
  /*
   NULL where the model is not in host memory.
   */
  const uint8_t *data;
  /*
   In the arena.
   */
  uint64_t offset;
  /*
   Bytes of the tensor's data.
   */
  uint64_t bytes;
  /*
   BLAKE3 of its data.
   */
  uint8_t hash[32];
  /*
   0 BOOL, 1 U8, 2 I8, 3 `F8_E5M2`, 4 `F8_E4M3`, 5 `F8_E8M0`, 6 I16, 7 U16, 8 F16, 9 BF16, 10 I32, 11 U32, 12 F32, 13 C64, 14 F64,
   15 I64, 16 U64, 17 F4, 18 `F6_E2M3`, 19 `F6_E3M2`, 20 any other.
   */
  uint8_t dtype;
} gshare_tensor;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Connects to the store at a path; NULL, with the reason in `error`, if that cannot be.

 # Safety
 `path` ends with a 0; `error` is null or has `error_bytes` bytes.
 */
struct gshare_store *gshare_store_connect(const char *path, char *error, size_t error_bytes);

/*
 Ends a connection; models that came over it stay.

 # Safety
 `store` is null or came from `gshare_store_connect`, and is not used again.
 */
void gshare_store_close(struct gshare_store *store);

/*
 Takes a reference to a model in a tier, waiting for a load if need be; `gshare_model_release` gives it back. NULL, with the
 reason in `error`, if it is refused. The model outlives the connection and the store. It is mapped at the first look at its
 tensors.

 # Safety
 `store` came from `gshare_store_connect`; `name` ends with a 0; `error` is null or has `error_bytes` bytes.
 */
struct gshare_model *gshare_store_get(struct gshare_store *store,
                                      const char *name,
                                      uint32_t tier,
                                      uint32_t timeout_ms,
                                      char *error,
                                      size_t error_bytes);

/*
 Gives a model's reference back.

 # Safety
 `model` is null or came from `gshare_store_get`; neither it nor what it pointed to is used again.
 */
void gshare_model_release(struct gshare_model *model);

/*
 Loads the safetensors file that is open at `descriptor`, which stays the caller's. 0, or a code.

 # Safety
 As `gshare_store_get`; `descriptor` is open.
 */
int32_t gshare_store_put_file(struct gshare_store *store,
                              const char *name,
                              int32_t descriptor,
                              uint32_t access_number,
                              char *error,
                              size_t error_bytes);

/*
 Stores tensors from memory: name, shape, data, bytes and dtype of each are read. 0, or a code.

 # Safety
 As `gshare_store_get`; `tensors` are `count`, each with a name, a shape and data of the lengths it says.
 */
int32_t gshare_store_put(struct gshare_store *store,
                         const char *name,
                         uint32_t access_number,
                         const struct gshare_tensor *tensors,
                         size_t count,
                         char *error,
                         size_t error_bytes);

/*
 Takes a model out of memory; with `forget`, its name is free after that. 0, or a code.

 # Safety
 As `gshare_store_get`.
 */
int32_t gshare_store_evict(struct gshare_store *store,
                           const char *name,
                           int32_t forget,
                           char *error,
                           size_t error_bytes);

/*
 The bytes of all arenas that the store has in a tier, to the byte, for comparing its books with others. 0, or a code.

 # Safety
 `store` came from `gshare_store_connect`; `bytes` has room for one; `error` is null or has `error_bytes` bytes.
 */
int32_t gshare_store_arena_bytes(struct gshare_store *store,
                                 uint32_t tier,
                                 uint64_t *bytes,
                                 char *error,
                                 size_t error_bytes);

/*
 Maps a model, which the first look at a tensor does, too, after a check that no process can write to it or cut it. 0, or a code,
 with the reason in `error`, where the store handed out something else, or the system refuses the map.

 # Safety
 `model` is null or came from `gshare_store_get`; `error` is null or has `error_bytes` bytes.
 */
int32_t gshare_model_open(const struct gshare_model *model,
                          char *error,
                          size_t error_bytes);

/*
 Number of tensors; 0 where the model cannot be mapped, of which `gshare_model_open` says the reason.

 # Safety
 `model` is null or came from `gshare_store_get`.
 */
uint64_t gshare_model_tensors(const struct gshare_model *model);

/*
 The tensor at a position, in the order of the names. 0, or `GSHARE_ERROR_ARGUMENT` beyond the last, or
 `GSHARE_ERROR_SYSTEM` where the model cannot be mapped.

 # Safety
 `model` is null or came from `gshare_store_get`; `tensor` has room for one.
 */
int32_t gshare_model_tensor(const struct gshare_model *model, uint64_t at, struct gshare_tensor *tensor);

/*
 Bytes of the arena.

 # Safety
 `model` is null or came from `gshare_store_get`.
 */
uint64_t gshare_model_bytes(const struct gshare_model *model);

/*
 The content hash of the model: 32 bytes.

 # Safety
 `model` came from `gshare_store_get`; `content` has 32 bytes.
 */
void gshare_model_content(const struct gshare_model *model, uint8_t *content);

/*
 The descriptor of the arena, or -1; it stays the model's.

 # Safety
 `model` is null or came from `gshare_store_get`.
 */
int32_t gshare_model_descriptor(const struct gshare_model *model);

/*
 Maps a model of the GPU tier for reading, into the primary context of a device of this process: the address of its arena there,
 to which a tensor's offset is added. It stays until the model is released; asked again, the address is the same. 0, with the
 reason in `error`, where the model is in no such memory, or the driver refuses.

 # Safety
 `model` is null or came from `gshare_store_get`; `error` is null or has `error_bytes` bytes.
 */
uint64_t gshare_model_map(struct gshare_model *model,
                          uint32_t device,
                          char *error,
                          size_t error_bytes);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* GSHARE_STORE_H */
