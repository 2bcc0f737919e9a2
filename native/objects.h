/* The functions of the extension `_objects` that files share, and how they walk over Python's objects. */
#ifndef STEPWELL_OBJECTS_H
#define STEPWELL_OBJECTS_H
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* AHEAD: how many objects further the processor fetches what it will need. */
enum { AHEAD = 8, LINE = 64, OBJECT_BYTES = 40 };

/* A record that is being made. */
typedef struct made {
    uint64_t *words;
    size_t count, room;
} made;

static inline int add(made *out, uint64_t word)
{
    if (out->count == out->room) {
        const size_t room = out->room ? out->room * 2 : 1024;
        uint64_t *words = PyMem_Realloc(out->words, room * sizeof *words);
        if (!words) {
            PyErr_NoMemory();
            return -1;
        }
        out->words = words;
        out->room = room;
    }
    out->words[out->count++] = word;
    return 1;
}

static inline int add_all(made *out, const made *more)
{
    int result = 1;
    for (size_t at = 0; result > 0 && at < more->count; at++)
        result = add(out, more->words[at]);
    return result;
}

/* result: of what was done: 1, 0 for what cannot be recorded, or -1. */
static inline PyObject *finished(made *out, int result)
{
    PyObject *record = NULL;
    if (result > 0)
        record = PyByteArray_FromStringAndSize((const char *)out->words, (Py_ssize_t)(out->count * sizeof(uint64_t)));
    PyMem_Free(out->words);
    return result == 0 ? Py_NewRef(Py_None) : record;
}

static inline uint64_t word_at(uint64_t address, Py_ssize_t offset)
{
    uint64_t word;
    memcpy(&word, (const char *)(uintptr_t)address + offset, sizeof word);
    return word;
}

static inline uint64_t address_of(PyObject *object)
{
    return (uint64_t)(uintptr_t)object;
}

static inline PyObject *object_at(uint64_t address)
{
    return (PyObject *)(uintptr_t)address;
}

static inline void fetch(uint64_t address, size_t size)
{
    for (uint64_t line = address & ~(uint64_t)(LINE - 1); line < address + size; line += LINE)
        __builtin_prefetch((const void *)(uintptr_t)line);
}

PyObject *study_modules(PyObject *module, PyObject *arguments);
PyObject *modules_again(PyObject *module, PyObject *arguments);
PyObject *study_entries(PyObject *module, PyObject *arguments);
PyObject *entries_again(PyObject *module, PyObject *arguments);
PyObject *study_tensors(PyObject *module, PyObject *arguments);
PyObject *tensors_again(PyObject *module, PyObject *arguments);

#endif
