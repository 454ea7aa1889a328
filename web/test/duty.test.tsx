// @vitest-environment jsdom
/**
 * Every place shows the server's duty, and decides nothing: the job's page, its tabs, the list, the Overview and the
 * notification. `duty_job.json` has answers of a job for which these places once disagreed.
 */
import { act, screen, waitFor } from '@testing-library/react'
import { readFileSync } from 'node:fs'
import { join } from 'node:path'
import { Route, Routes } from 'react-router'
import { afterEach, describe, expect, test, vi } from 'vitest'

import type { Duty, TrainingJob, TrainingJobSummary } from '../src/contract'
import { verdict } from '../src/model/verdict'
import JobPage from '../src/pages/Job'
import JobsPage from '../src/pages/Jobs'
import OverviewPage from '../src/pages/Overview'
import Notifier from '../src/parts/Notifier'
import { drawn, served } from './drawn'

const recorded = JSON.parse(readFileSync(join(import.meta.dirname, 'duty_job.json'), 'utf8')) as {
  job: TrainingJob
  sum: TrainingJobSummary
  now: number
}
const KINDS: [Duty['Kind'], Duty['Urgency'], string][] = [
  ['CapacityWait', 'Later', 'Decide: wait for the next attempt, or (recommended) continue on 2 nodes.'],
  ['TakenOver', 'Now', 'Act now: hand the job back.'],
  ['RecoveryLate', 'Now', 'Act now: find out what the recovery waits for.'],
  ['Stalled', 'Now', 'Act now: find out why the ranks make no steps.'],
  ['Paused', 'Optional', 'Optional: resume the job.'],
  ['Nothing', 'None', 'Nothing to do.'],
]
const dutyOf = ([Kind, Urgency, Sentence]: (typeof KINDS)[number]): Duty => ({ Kind, Urgency, Sentence, Actions: [] })
const JOB = recorded.job.TrainingJobName

/** Return the texts of all elements that show the job's duty. */
const duties = () =>
  [...document.querySelectorAll<HTMLElement>('[data-figure="duty"]')].map((each) => [
    each.dataset.value,
    [
      each.textContent,
      each.title,
      ...[...each.querySelectorAll<HTMLElement>('[title]')].map(({ title }) => title),
    ].join(' '),
  ])

function page(duty: Duty, at: string) {
  const job = { ...recorded.job, Duty: duty }
  const listed = { ...recorded.sum, RunId: job.RunId, Duty: duty }
  const pressing = duty.Urgency === 'Now' || duty.Urgency === 'Later'
  const shown = { TrainingJobName: JOB, RunId: job.RunId, FleetName: job.FleetName, Project: job.Project, Duty: duty }
  return drawn(
    <Routes>
      <Route path="/" element={<OverviewPage />} />
      <Route path="/jobs" element={<JobsPage />} />
      <Route path="/jobs/:name/:tab?" element={<JobPage />} />
    </Routes>,
    {
      at,
      answers: {
        [`["job","${JOB}"]`]: job,
        '["jobs"]': [listed],
        '["jobs","duties"]': pressing ? [shown] : [],
        '["fleets"]': [],
        '["nodes","",false]': [],
        '["incidents","","open"]': [],
        [`["incidents","${JOB}"]`]: [],
        '["report","today"]': undefined,
      },
    },
  )
}

afterEach(() => vi.unstubAllGlobals())

describe.each(KINDS)('the duty %s, %s', (...kind) => {
  const duty = dutyOf(kind)
  const isPressing = duty.Urgency === 'Now' || duty.Urgency === 'Later'
  test.each([`/jobs/${JOB}`, `/jobs/${JOB}/events`])('has its sentence on %s', async (at) => {
    served({})
    page(duty, at)
    if (at === `/jobs/${JOB}`) await screen.findByText(new RegExp(duty.Sentence.replace(/[()?.]/g, '.')), undefined)
    else expect(duties().every(([value, text]) => value === duty.Sentence && text!.includes(duty.Sentence))).toBe(true)
  })
  test('is in the Overview and counts in the list exactly if it needs a person', () => {
    served({})
    page(duty, '/').unmount()
    page(duty, '/')
    expect(duties().map(([value]) => value)).toEqual(isPressing ? [duty.Sentence] : [])
    expect(document.querySelector('[data-figure="verdict"]')!.textContent).toMatch(
      isPressing ? /^1 item needs you\./ : /^Nothing needs you\./,
    )
  })
  test('is counted in the list of jobs', () => {
    served({})
    page(duty, '/jobs')
    const head = document.querySelector('[data-figure="verdict"]')!.textContent
    expect(/^1 job needs attention\./.test(head)).toBe(isPressing)
  })
  test('never stands beside a contradiction in the first line', () => {
    const { line } = verdict({ job: { ...recorded.job, Duty: duty }, now: recorded.now })
    expect(line.text.endsWith(duty.Sentence)).toBe(true)
    expect(line.tone === 'bad').toBe(duty.Urgency === 'Now')
  })
})

test('a watched job with a new urgent duty causes one notification with its sentence', async () => {
  const shown: [string, string][] = []
  class Told {
    onclick = () => {}
    constructor(title: string, { body }: { body: string }) {
      shown.push([title, body])
    }
  }
  vi.stubGlobal('Notification', Told)
  const duty = dutyOf(KINDS[3]!)
  const listed = (Duty: Duty) => [{ ...recorded.sum, RunId: 'run', Duty }]
  const { client } = drawn(<Notifier runIds={new Set(['run'])} />, {
    answers: { '["jobs"]': listed(dutyOf(KINDS[5]!)) },
  })
  for (let count = 0; count < 2; count++) act(() => void client.setQueryData(['jobs'], listed({ ...duty })))
  await waitFor(() => expect(shown).toEqual([[`${JOB} needs you now`, duty.Sentence]]))
})

test('the first missed request greys the verdict and turns actions off', async () => {
  const duty = dutyOf(KINDS[3]!)
  const { client } = page(duty, `/jobs/${JOB}`)
  expect(screen.getByRole<HTMLButtonElement>('button', { name: 'Pause' }).disabled).toBe(false)
  vi.stubGlobal('fetch', () => Promise.reject(new TypeError('no route')))
  void client.invalidateQueries({ queryKey: ['fleets'] })
  await waitFor(() => expect(document.querySelector('[data-figure="verdict"]')!.textContent).toMatch(/^Last known: /), {
    timeout: 3000,
  })
  expect(document.querySelector<HTMLElement>('[data-figure="verdict"]')!.dataset.tone).toBe('idle')
  expect(screen.getByRole<HTMLButtonElement>('button', { name: 'Pause' }).disabled).toBe(true)
})
