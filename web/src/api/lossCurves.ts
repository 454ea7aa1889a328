/** Requests the loss curves of the jobs in view: in one request, and again when a job has made steps. */
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { useEffect, useRef } from 'react'

import type { TrainingJobSummary } from '../contract'
import { curvesToRequest, withCurves, type HeldCurves } from '../model/lossCurves'
import { call, serverTime } from './client'

const KEY = ['loss-curves']
const NONE: HeldCurves = {}
/** A list that is being scrolled requests nothing until it rests for this long. */
const REST_MS = 150

/** Return the held curves by RunId, and request those that the jobs in view lack. */
export function useLossCurves(inView: readonly TrainingJobSummary[]): HeldCurves {
  const client = useQueryClient()
  const held = useQuery({ queryKey: KEY, queryFn: () => NONE, enabled: false, staleTime: Infinity }).data ?? NONE
  const isBusy = useRef(false)
  useEffect(() => {
    const runs = new Set(curvesToRequest(inView, held, serverTime()))
    if (!runs.size || isBusy.current) return
    const steps = new Map(inView.filter(({ RunId }) => runs.has(RunId)).map((job) => [job.RunId, job.Boundary]))
    const request = async () => {
      isBusy.current = true
      try {
        const curves = (await call('BatchGetLossCurves', { RunIds: [...steps.keys()].join() })).LossCurves ?? []
        client.setQueryData<HeldCurves>(KEY, (before = NONE) => withCurves(before, steps, curves, serverTime()))
      } catch {
        // The next answer of the list starts another request. The list itself reports a server that does not answer.
      } finally {
        isBusy.current = false
      }
    }
    const timer = setTimeout(() => void request(), REST_MS)
    return () => clearTimeout(timer)
  }, [client, held, inView])
  return held
}
