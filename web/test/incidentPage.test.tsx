// @vitest-environment jsdom
/** The page of one incident: where its ranks stood, what they printed last, and where the runbook tells of its cause. */
import { screen } from '@testing-library/react'
import { Route, Routes } from 'react-router'
import { expect, test } from 'vitest'

import type { Event, Incident, LogEvent } from '../src/contract'
import IncidentPage from '../src/pages/Incident'
import { drawn } from './drawn'

const NOW = Math.floor(Date.now() / 1000)
const incident: Incident = {
  IncidentId: 'inc-1', TrainingJobName: 'gpt', RunId: 'run', Cause: 'hang', Phase: 'closed', Evidence: ['hang: all 4 ranks stood still'], Decision: 'restart all ranks on the same nodes', Reason: '', GenerationBefore: 1, GenerationAfter: 2,
  RankSources: [], InstanceIds: ['i-a'], FaultedInstanceIds: ['i-a'], ReplacementInstanceIds: [], FailedAt: NOW - 100, OpenedAt: NOW - 40, ClosedAt: NOW - 20, DetectSeconds: 60,
}
const look = (EventId: number, Time: number, Type: string, text: string): Event => ({ EventId, Time, Type, Message: `${Type} told`, Detail: { stacks: [{ ranks: [0, 1], text }] } })
const line = (Rank: number, Message: string): LogEvent => ({ Timestamp: NOW - 101, Generation: 1, NodeId: 'i-a', Rank, Stream: 'stdout', Message })
const page = (job: object) =>
  drawn(
    <Routes>
      <Route path="/incidents/:id" element={<IncidentPage />} />
    </Routes>,
    {
      at: '/incidents/inc-1',
      answers: {
        '["incident","inc-1"]': incident,
        '["job","gpt"]': { TrainingJobName: 'gpt', FleetName: 'main', ...job },
        [JSON.stringify(['events', 'gpt', 'around', 'inc-1', incident.ClosedAt])]: [look(2, NOW - 60, 'RanksStandStill', 'the first look'), look(3, NOW - 40, 'RanksHang', 'the proof')],
        [JSON.stringify(['nodes', 'main', false])]: [{ NodeId: 'i-a', NodeStatus: 'held', Hold: 'inspection' }],
        [JSON.stringify(['printed', 'inc-1', incident.FailedAt])]: [line(0, 'step 7'), line(1, '\u001b[31mwaits\u001b[0m')],
      },
    },
  )

test('the looks of this incident, the newest first and open, and the last lines', () => {
  page({ RunId: 'run' })
  screen.getByRole('heading', { level: 1, name: 'The ranks stood still' })
  expect(screen.getByRole('link', { name: 'The runbook about this' }).getAttribute('href')).toBe('/runbook.html#hang')
  const stood = screen.getByRole('region', { name: 'Where the ranks stood' })
  expect([...stood.querySelectorAll('pre')].map((each) => each.textContent)).toEqual(['the proof', 'the first look'])
  expect([...stood.querySelectorAll('details')].map((each) => each.open)).toEqual([true, false])
  const printed = screen.getByRole('region', { name: 'What the ranks printed last' }).querySelector('pre')!
  expect(printed.textContent).toMatch(/ rank 0 {2}step 7\n.* rank 1 {2}waits$/)
  screen.getByText('Yes, but for a held node')
})
test('of a run whose name another one has by now, nothing of that one is told', () => {
  page({ RunId: 'later', TrainingJobStatus: 'Failed', FailureReason: 'another story', TrainingEndTime: incident.ClosedAt })
  screen.getByText('Yes')
  expect(screen.queryByText(/another story/)).toBeNull()
  expect(screen.queryByRole('region', { name: 'What the ranks printed last' })).toBeNull()
})
