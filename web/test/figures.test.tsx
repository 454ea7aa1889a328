// @vitest-environment jsdom
/** All figures of a page agree for any answers of the API, and the steps that a page advises fit its figures. */
import { screen } from '@testing-library/react'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { Route, Routes } from 'react-router'
import { describe, expect, test, vi } from 'vitest'

import { loaded } from '../src/api/pages'
import type { CapacityWait, Duty, Fleet, Incident, Node, TrainingJob } from '../src/contract'
import { inLineOrder } from '../src/model/printed'
import { buckets } from '../src/model/time'
import { fleetFigures, phaseLengths } from '../src/model/figures'
import { verdict, type Facts } from '../src/model/verdict'
import JobPage from '../src/pages/Job'
import { ActCard } from '../src/parts/ActCard'
import { LastLines } from '../src/parts/LastLines'
import NodeDialog from '../src/parts/NodeDialog'
import { drawn } from './drawn'

const NOW = Math.floor(Date.now() / 1000)
const AWS =
  'We currently do not have sufficient p5.48xlarge capacity in the Availability Zone you requested (us-east-2a)'
const NOTHING: Duty = { Kind: 'Nothing', Urgency: 'None', Sentence: 'Nothing to do.', Actions: [] }
const CapacityWait: CapacityWait = {
  MissingNodeCount: 1,
  InstanceType: 'p5.48xlarge',
  AvailabilityZone: 'us-east-2a',
  Message: AWS,
  IsOutOfCapacity: true,
  FailedAttemptCount: 1,
  NextAttemptTime: NOW + 30,
}
const incident = (changes: Partial<Incident> = {}): Incident => ({
  IncidentId: 'inc-1',
  Headline: 'An instance was terminated',
  TrainingJobName: 'gpt',
  Project: 'default',
  RunId: 'run',
  Cause: 'instance_terminated',
  Phase: 'replace',
  Outcome: 'Open',
  Evidence: ['EC2 says so'],
  EvidenceFacts: [],
  Decision: 'replace i-0123456789abcdef0 and restart all ranks',
  Reason: 'lost',
  GenerationBefore: 1,
  RankSources: [],
  InstanceIds: ['i-a'],
  FaultedInstanceIds: ['i-a'],
  ReplacementInstanceIds: [],
  FailedAt: NOW - 60,
  OpenedAt: NOW - 58,
  DetectSeconds: 2,
  ReachedStep: 78,
  ...changes,
})
const closed = (cause: Incident['Cause'], seconds: number, id: string) =>
  incident({
    IncidentId: id,
    Cause: cause,
    Phase: 'closed',
    Outcome: 'Recovered',
    FailedAt: NOW - 900,
    OpenedAt: NOW - 899,
    ClosedAt: NOW - 899 + seconds + 2,
    DetectSeconds: 1,
    ReplaceSeconds: seconds,
    RestoreSeconds: 1,
    ReworkSeconds: 1,
  })
const recovering = (changes: Partial<Facts> = {}): Facts => ({
  job: {
    TrainingJobName: 'gpt',
    Duty: NOTHING,
    RunId: 'run',
    FleetName: 'main',
    TrainingJobStatus: 'InProgress',
    SecondaryStatus: 'Restarting',
    Reason: '',
    CapacityWait,
    Boundary: 78,
    MaxBoundary: 78,
    CommittedStep: 78,
  },
  incidents: [closed('rank_exit', 0.1, 'a'), closed('rank_exit', 0.2, 'b'), incident()],
  fleet: {
    FleetName: 'main',
    FleetStatus: 'active',
    SpareCount: 1,
    InstanceType: 'p5.48xlarge',
    AvailabilityZone: 'us-east-2a',
    Reason: '',
  },
  now: NOW,
  ...changes,
})

test('a recovery is compared with incidents of its own kind', () => {
  const job = { ...recovering().job, CapacityWait: undefined, Reason: 'waits for i-b to prepare' }
  expect(verdict(recovering({ job })).recovery).toMatchObject({ usualSeconds: undefined })
})

test('where the facts do not decide about a held node, nothing is chosen for a person', () => {
  const node = {
    NodeId: 'i-0123456789abcdef0',
    FleetName: 'main',
    NodeStatus: 'held',
    Hold: 'inspection',
    HoldAdvice: { Decision: 'Terminate', Description: 'Terminate it.', Command: 'x', FurtherCommands: [] },
  } as unknown as Node
  const { unmount } = drawn(<NodeDialog node={node} onClose={() => undefined} />)
  expect(screen.getByRole<HTMLInputElement>('radio', { name: /^Terminate/ }).checked).toBe(true)
  unmount()
  const unclear = { ...node, HoldAdvice: { ...node.HoldAdvice!, Decision: 'Inspect' as const } }
  drawn(<NodeDialog node={unclear} onClose={() => undefined} />)
  expect(screen.getAllByRole<HTMLInputElement>('radio').some((each) => each.checked)).toBe(false)
  expect(screen.getByRole<HTMLButtonElement>('button', { name: 'Choose an action' }).disabled).toBe(true)
})

test('an instance id never breaks inside, and a title with ids is one text', () => {
  const css = readFileSync(join(import.meta.dirname, '../src/styles/base.css'), 'utf8')
  expect(css).toMatch(/\.id \{[^}]*white-space: nowrap/)
  const duty = { ...NOTHING, Explanation: 'Automation is off: a failure waits for i-0123456789abcdef0.' }
  const { container } = drawn(<ActCard duty={duty} figures={verdict(recovering()).figures} runId="run" />)
  expect(container.querySelector('p .id')!.textContent).toBe('i-0123456789abcdef0')
})

describe('a part of the application', () => {
  const here = (reloads: boolean) => ({ answers: vi.fn(() => Promise.resolve()), reload: vi.fn(() => reloads) })
  test('waits for a server that is away', async () => {
    const browser = here(true)
    const load = vi
      .fn<() => Promise<string>>()
      .mockRejectedValueOnce(new TypeError('Failed to fetch dynamically imported module'))
      .mockResolvedValue('the page')
    await expect(loaded(load, browser)).resolves.toBe('the page')
    expect(browser.answers).toHaveBeenCalledTimes(1)
    expect(browser.reload).not.toHaveBeenCalled()
  })
  test('that an update has replaced loads the application anew', async () => {
    const browser = here(true)
    void loaded(() => Promise.reject(new TypeError('gone')), browser)
    await vi.waitFor(() => expect(browser.reload).toHaveBeenCalledTimes(1))
  })
  test('that a new application cannot load either is an error', async () => {
    await expect(loaded(() => Promise.reject(new TypeError('broken')), here(false))).rejects.toThrow('broken')
  })
})

test('lines are in the order of each rank, and merged by time', () => {
  const line = (Rank: number, Timestamp: number, Message: string) => ({
    NodeId: 'i-a',
    Rank,
    Timestamp,
    Message,
    Stream: 'stdout' as const,
  })
  const lines = [line(0, 10, 'a'), line(1, 12, 'c'), line(0, 11, 'b'), line(1, 5, 'd, after the clock was set back')]
  expect(inLineOrder(lines).map((each) => each.Message)).toEqual(['a', 'b', 'c', 'd, after the clock was set back'])
})

test('a traceback opens at its last line', () => {
  const height = vi.spyOn(Element.prototype, 'scrollHeight', 'get').mockReturnValue(900)
  const { container } = drawn(<LastLines text={'Traceback\n…\nValueError: no'} />)
  expect(container.querySelector('pre')!.scrollTop).toBe(900)
  height.mockRestore()
})

test('a fleet that lacks nodes waits for instances', () => {
  const fleet = { FleetStatus: 'active', DesiredNodeCount: 5, ConnectedNodeCount: 4, Reason: 'waits' } as Fleet
  expect(fleetFigures(fleet)).toMatchObject({ statusTone: 'busy', status: 'waits for 1 instance' })
  expect(fleetFigures({ ...fleet, ConnectedNodeCount: 5 })).toMatchObject({ statusTone: 'good', status: 'active' })
})

test('the phase of an open incident is as long as its part of the time', () => {
  const open = incident({ FailedAt: NOW - 60, OpenedAt: NOW - 50, DetectSeconds: 10 })
  const job = {
    CreationTime: NOW - 1000,
    AccountedUntil: NOW - 4,
    AccountingSeconds: { train: 940, detect: 10, replace: 46 },
  }
  const found = Object.fromEntries(buckets(job, NOW, open).buckets.map((each) => [each.name, each.seconds]))
  for (const { phase, seconds } of phaseLengths(open, NOW)) expect(found[phase]).toBeCloseTo(seconds)
  expect(found.rest).toBeUndefined()
})

/** Yield random but possible answers of the API about one job at one moment of its life. */
function* stories(count: number) {
  let state = 26
  const random = (below: number) => (state = (state * 1103515245 + 12345) % 2147483648) % below
  for (let number = 0; number < count; number++) {
    const reached = 1 + random(900)
    const kept = [undefined, 0, reached, Math.floor(reached / 2)][random(4)]
    const end = (['Completed', 'Failed', 'Stopped', undefined, undefined] as const)[random(5)]
    const paused = end === undefined && random(3) === 0
    const lost = random(4) === 0 ? random(20) : 0
    const ended = {
      Phase: 'closed',
      Outcome: end === undefined ? ('Recovered' as const) : (`Job${end}` as const),
      ClosedAt: NOW - 10,
      DetectSeconds: 1,
      ReplaceSeconds: 2,
      RestoreSeconds: 3,
      ReworkSeconds: 0,
      LostSteps: lost,
      GenerationAfter: 2,
      FromStep: reached - lost,
    } as const
    const job: Partial<TrainingJob> = {
      TrainingJobName: 'gpt',
      RunId: 'run',
      FleetName: 'main',
      TrainingJobStatus: end ?? 'InProgress',
      SecondaryStatus: end ?? (paused ? 'Paused' : 'Training'),
      Reason: 'a reason',
      FailureReason: end === 'Failed' ? 'gave up' : undefined,
      Boundary: reached,
      MaxBoundary: reached,
      BaseStep: 0,
      CommittedStep: reached,
      CreationTime: NOW - 1000,
      TrainingStartTime: NOW - 900,
      TrainingEndTime: end && NOW - 10,
      Generation: 2,
      NodeCount: 4,
      RanksPerNode: 1,
      IncidentCount: 1,
      OpenIncidentCount: 0,
      Duty: NOTHING,
      AccountingSeconds: { train: 900 },
      AccountedUntil: NOW,
      Priority: 0,
      SecondaryStatusTransitions: [],
      Reliability: { LostSteps: lost } as TrainingJob['Reliability'],
    }
    const checkpoint = kept === undefined ? undefined : { Step: kept, Generation: 1, CompletedAt: NOW - 100, Bytes: 1 }
    yield {
      number,
      job,
      reached,
      kept,
      end,
      paused,
      incidents: [incident({ ...ended, ReachedStep: reached })],
      protection: {
        TrainingJobName: 'gpt',
        CommittedStep: reached,
        ProtectionState: 'Unprotected',
        Reason: '',
        Shards: [],
        RecoveryOdds: [],
        LastCheckpoint: checkpoint,
      },
    }
  }
}

test.each([...stories(30)])(
  'all figures of the page agree, story $number',
  async ({ job, incidents, protection, reached, kept, end, paused }) => {
    const { container } = drawn(
      <Routes>
        <Route path="/jobs/:name" element={<JobPage />} />
      </Routes>,
      {
        at: '/jobs/gpt',
        answers: {
          '["job","gpt"]': job,
          '["protection","gpt"]': protection,
          '["incidents","gpt"]': incidents,
          '["incidents","","open"]': [],
          '["fleets"]': [],
          '["jobs"]': [],
          '["job","gpt","nodes"]': [],
          '["nodes","main",false]': [],
        },
      },
    )
    await screen.findByText('Committed in memory')
    const fact = (name: string) =>
      [...container.querySelectorAll('dt')].find((each) => each.textContent === name)!.nextElementSibling!.textContent
    const isReleased = end !== undefined || paused
    expect(fact('Committed in memory')).toBe(isReleased ? '–' : `step ${reached}`)
    const cell = fact('Recomputed steps')
    expect(cell).toBe(String(incidents[0]!.LostSteps!)) // repeated steps; a failed job's lost steps are another figure
    const isFinal = end === 'Failed' || end === 'Stopped'
    const lost = isFinal ? Math.max(0, reached - (kept ?? 0)) : incidents[0]!.LostSteps!
    const shown = container.querySelector(`.answers [data-figure=${isFinal ? 'unsaved' : 'recomputed'}-steps]`)
    expect(shown?.textContent).toBe(isFinal || lost > 0 ? String(lost) : undefined)
    expect(isFinal ? fact('Lost steps') : '').toBe(isFinal ? String(lost) : '')
  },
)
