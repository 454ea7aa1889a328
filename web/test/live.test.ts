// @vitest-environment jsdom
/** An event renews the queries that it names, and only a visible tab has an event stream. */
import { QueryClient, QueryObserver } from '@tanstack/react-query'
import { act, cleanup, renderHook } from '@testing-library/react'
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest'

import { Renewals, renewed, stream, useLive } from '../src/api/live'
import { whileVisible } from '../src/api/seen'

const keys = (event: object) => renewed(event).map((key) => key.join('/'))

test('an event of a job renews that job and the lists, and no other job', () => {
  const found = keys({ TrainingJobName: 'gpt', FleetName: 'main' })
  expect(found).toEqual(
    expect.arrayContaining(['jobs', 'incidents', 'fleets', 'job/gpt', 'protection/gpt', 'events/gpt', 'events//main']),
  )
  expect(found.filter((key) => key.startsWith('job/'))).toEqual(['job/gpt'])
})

test('an event of a job also renews pages that were opened by its RunId', () => {
  const jobs = [
    { TrainingJobName: 'gpt', RunId: '1a' },
    { TrainingJobName: 'bert', RunId: '2b' },
  ]
  const found = renewed({ TrainingJobName: 'gpt' }, jobs).map((key) => key.join('/'))
  expect(found).toEqual(expect.arrayContaining(['job/1a', 'events/1a', 'logs/1a']))
  expect(found.filter((key) => key.endsWith('2b'))).toEqual([])
})

test('an event of a fleet renews no job page', () => {
  expect(keys({ FleetName: 'main' }).filter((key) => key.startsWith('job/') || key.startsWith('protection'))).toEqual(
    [],
  )
})

/** A fake EventSource, whose events the tests send. */
class Source {
  static readonly CLOSED = 2
  static made: Source[] = []
  readyState = 0
  onopen?: () => void
  onmessage?: (message: { data: string }) => void
  onerror?: () => void
  constructor(readonly url: string) {
    Source.made.push(this)
  }
  addEventListener() {}
  close() {
    this.readyState = Source.CLOSED
  }
}
const open = () => Source.made.filter((each) => each.readyState !== Source.CLOSED)
const show = (state: 'hidden' | 'visible') => {
  vi.spyOn(document, 'visibilityState', 'get').mockReturnValue(state)
  act(() => void document.dispatchEvent(new Event('visibilitychange')))
}
beforeEach(() => {
  Source.made = []
  vi.stubGlobal('EventSource', Source)
})
afterEach(() => {
  cleanup()
  vi.unstubAllGlobals()
  vi.useRealTimers()
})

describe('the stream', () => {
  test('is open only while the tab is visible, and each new stream renews all queries', () => {
    const client = new QueryClient()
    const renew = vi.spyOn(client, 'invalidateQueries')
    const { result, unmount } = renderHook(() => useLive(client, true))
    act(() => open()[0]!.onopen!())
    expect([open().length, result.current, stream.isOpen]).toEqual([1, 'live', true])
    show('hidden')
    expect([open().length, result.current, stream.isOpen]).toEqual([0, 'connecting', false])
    show('visible')
    expect(Source.made).toHaveLength(2)
    expect(result.current).toBe('connecting')
    act(() => open()[0]!.onopen!())
    expect([open().length, result.current, stream.isOpen]).toEqual([1, 'live', true])
    expect(renew).toHaveBeenCalledTimes(2)
    unmount()
    expect([open().length, stream.isOpen]).toEqual([0, false])
  })
  test('counts as interrupted from an error until it opens again, or if it does not open in time', () => {
    vi.useFakeTimers()
    const client = new QueryClient()
    const { result } = renderHook(() => useLive(client, true))
    act(() => open()[0]!.onopen!())
    act(() => void vi.runAllTimers())
    expect(result.current).toBe('live')
    act(() => open()[0]!.onerror!())
    expect([result.current, stream.isOpen]).toEqual(['cut', false])
    act(() => open()[0]!.onopen!())
    expect(result.current).toBe('live')
    show('hidden')
    show('visible')
    expect(result.current).toBe('connecting')
    act(() => void vi.runAllTimers())
    expect(result.current).toBe('cut')
  })
  test('that the server refused is not opened again in a hidden tab', () => {
    vi.useFakeTimers()
    const client = new QueryClient()
    renderHook(() => useLive(client, true))
    act(() => {
      open()[0]!.close()
      Source.made[0]!.onerror!()
    })
    show('hidden')
    vi.runAllTimers()
    expect(Source.made).toHaveLength(1)
  })
})

describe('events that come faster than answers', () => {
  const event = { data: JSON.stringify({ TrainingJobName: 'gpt' }) }
  test('renew a query after its pending answer: no request is aborted, and no event is missed', async () => {
    vi.useFakeTimers()
    const client = new QueryClient()
    const asked: { answer: (value: number) => void; signal: AbortSignal }[] = []
    const fleets = new QueryObserver<number>(client, {
      queryKey: ['fleets'],
      queryFn: ({ signal }) => new Promise((answer) => asked.push({ answer, signal })),
      retry: false,
    })
    const gone = fleets.subscribe(() => {})
    asked[0]!.answer(0)
    renderHook(() => useLive(client, true))
    for (let round = 1; round <= 3; round += 1) {
      for (let each = 0; each < 3; each += 1) {
        open()[0]!.onmessage!(event)
        await vi.advanceTimersByTimeAsync(100)
      }
      expect(asked.map(({ signal }) => signal.aborted)).toEqual(Array(round + 1).fill(false))
      asked[round]!.answer(round)
      await vi.advanceTimersByTimeAsync(100)
      expect(fleets.getCurrentResult().data).toBe(round)
    }
    asked.at(-1)!.answer(4)
    await vi.advanceTimersByTimeAsync(1_000)
    expect([fleets.getCurrentResult().data, asked.length]).toEqual([4, 5]) // the last event causes one more request
    gone()
  })
  test('wait only for pending requests of the same query', async () => {
    vi.useFakeTimers()
    const told: string[] = []
    const renewals = new Renewals((key) => {
      told.push(key.join('/'))
      return key[0] === 'slow' ? new Promise(() => {}) : Promise.resolve()
    })
    for (let each = 0; each < 2; each += 1) {
      renewals.add([['slow'], ['fast']])
      await vi.advanceTimersByTimeAsync(100)
    }
    expect(told).toEqual(['slow', 'fast', 'fast'])
  })
})

test('whileVisible begins in a visible tab, ends in a hidden tab, and never does either twice in a row', () => {
  const told: string[] = []
  show('hidden')
  const stop = whileVisible(
    () => told.push('begin'),
    () => told.push('end'),
  )
  expect(told).toEqual([])
  for (const state of ['visible', 'visible', 'hidden', 'hidden', 'visible'] as const) show(state)
  stop()
  show('visible')
  expect(told).toEqual(['begin', 'end', 'begin', 'end'])
})
