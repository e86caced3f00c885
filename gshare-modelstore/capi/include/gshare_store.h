/* The model store's client. A test compiles this header and compares it with the library.
 *
 * A function that can fail takes a buffer for an error text (may be NULL) and answers NULL or a code that is not 0. Nothing here
 * is thread-safe on the same object, except gshare_model_release of different models. Text is UTF-8. */
#ifndef GSHARE_STORE_H
#define GSHARE_STORE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gshare_store gshare_store;
typedef struct gshare_model gshare_model;

/* Which memory. */
#define GSHARE_TIER_GPU 0
#define GSHARE_TIER_HOST 1

/* Who may read. */
#define GSHARE_ACCESS_PRIVATE 0
#define GSHARE_ACCESS_GROUP 1
#define GSHARE_ACCESS_PUBLIC 2

/* Codes below 100 are the store's; these are of this side. */
#define GSHARE_ERROR_GONE 100
#define GSHARE_ERROR_ARGUMENT 101
#define GSHARE_ERROR_SYSTEM 102

/* A tensor of a model. Pointers stay good until the model is released; nobody can write to `data`. */
typedef struct gshare_tensor {
    const char *name; /* not terminated */
    uint64_t name_bytes;
    const uint64_t *shape;
    uint64_t rank;
    const uint8_t *data; /* NULL where the model is not in host memory */
    uint64_t offset;     /* in the arena */
    uint64_t bytes;
    uint8_t hash[32]; /* BLAKE3 */
    uint8_t dtype;    /* 0 BOOL 1 U8 2 I8 3 F8_E5M2 4 F8_E4M3 5 F8_E8M0 6 I16 7 U16 8 F16 9 BF16 10 I32 11 U32
                         12 F32 13 C64 14 F64 15 I64 16 U64 */
} gshare_tensor;

gshare_store *gshare_store_connect(const char *path, char *error, size_t error_bytes);
void gshare_store_close(gshare_store *store);

/* Takes a reference; gshare_model_release gives it back. The model outlives the store's handle and the store. */
gshare_model *gshare_store_get(gshare_store *store, const char *name, uint32_t tier, uint32_t timeout_ms, char *error,
                               size_t error_bytes);
void gshare_model_release(gshare_model *model);

/* Loads the safetensors file that is open at `descriptor`, which stays the caller's. */
int32_t gshare_store_put_file(gshare_store *store, const char *name, int32_t descriptor, uint32_t access, char *error,
                              size_t error_bytes);
/* Stores tensors from memory: name, shape, data, bytes and dtype of each are read. */
int32_t gshare_store_put(gshare_store *store, const char *name, uint32_t access, const gshare_tensor *tensors,
                         size_t count, char *error, size_t error_bytes);
int32_t gshare_store_evict(gshare_store *store, const char *name, int32_t forget, char *error, size_t error_bytes);

uint64_t gshare_model_tensors(const gshare_model *model);
/* The tensor at a position in the order of the names; 0, or GSHARE_ERROR_ARGUMENT beyond the last. */
int32_t gshare_model_tensor(const gshare_model *model, uint64_t at, gshare_tensor *tensor);
uint64_t gshare_model_bytes(const gshare_model *model);
void gshare_model_content(const gshare_model *model, uint8_t content[32]);
/* The descriptor of the arena, or -1; it stays the model's. */
int32_t gshare_model_descriptor(const gshare_model *model);

#ifdef __cplusplus
}
#endif
#endif
